"""Spark over the log: the best bid of each lot, while the auction runs. ``python books.py`` beside the folder ``bridge``."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import functions as f

from levada.actors.spark import session


def best_bids(address: str) -> list[tuple[str, str, int, int]]:
    """Return lot, bidder, cents and the number of bids of each lot that has bids."""
    spark = session(master="local[2]")
    try:
        events = spark.read.format("mailbox").options(address=address, mailbox="lots").load()
        best = events.where("kind = 'auction.raised'").groupBy("entity").agg(
            f.max_by("bidder", "cents"), f.max("cents"), f.count("*")
        )  # fmt: skip
        return [tuple(row) for row in best.orderBy("entity").collect()]
    finally:
        spark.stop()


if __name__ == "__main__":
    for lot, bidder, cents, bids in best_bids(f"unix://{Path('bridge').absolute()}/bridge.socket"):
        print(f"{lot}: {cents / 100:.2f} by {bidder}, {bids} bids")
