delay_start, delay_end = 1.5, 1.0
