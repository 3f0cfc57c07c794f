// Figures as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export const count = (value) => (value === undefined || value === null ? "" : whole.format(value));
export const some = (value) => (value ? whole.format(value) : "");

export function rate(value) {
  if (value === undefined || value === null || !isFinite(value)) return "";
  return value && value < 10 ? short.format(value) : whole.format(value);
}

export function seconds(value) {
  if (value === undefined || value === null || !isFinite(value)) return "";
  if (value === 0) return "0";
  if (value < 0.001) return `${whole.format(value * 1e6)} µs`;
  if (value < 1) return `${(value < 0.01 ? short : whole).format(value * 1e3)} ms`;
  if (value < 120) return `${(value < 10 ? short : whole).format(value)} s`;
  return value < 7200 ? `${whole.format(value / 60)} min` : `${short.format(value / 3600)} h`;
}

export function octets(value) {
  if (value === undefined || value === null || !isFinite(value)) return "";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return `${unit === "B" || value >= 100 ? whole.format(value) : short.format(value)} ${unit}`;
    value /= 1000;
  }
  return `${short.format(value)} TB`;
}

export const percent = (value) => `${value >= 10 ? whole.format(value) : short.format(value)} %`;
export const clock = (epoch) => new Date(epoch * 1000).toLocaleTimeString("en-GB");
