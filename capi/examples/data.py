"""Writes the records of the examples: `python3 data.py FILE`. Each is 16 numbers of four bytes in [0, 1)."""

import array
import sys

RECORDS = 266_672

numbers = array.array("f", ((n * 2654435761 % 2**32 >> 8) * 2**-24 for n in range(RECORDS * 16)))
if sys.byteorder == "big":
    numbers.byteswap()
with open(sys.argv[1], "wb") as file:
    numbers.tofile(file)
