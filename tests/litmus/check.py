"""Checks without herd7 that `table.txt` is the table of these tests: a row for each test and variant, in order, every
result as expected.

Usage: python3 tests/litmus/check.py
"""

import pathlib
import sys

from table import COLUMNS, as_expected, rows
from tests import TESTS


def main():
    here = pathlib.Path(__file__).parent
    header, *lines = (here / 'table.txt').read_text().split('\n\n')[0].splitlines()
    wrong = []
    if header.split()[2 : 2 + len(COLUMNS)] != [column for column, _, _ in COLUMNS]:
        wrong.append(f'the columns: {header}')
    found = []
    for line in lines:
        name, variant, *rest = line.split(maxsplit=2 + len(COLUMNS))
        cells, note = rest[: len(COLUMNS)], ' '.join(rest[len(COLUMNS) :])
        found.append((name, variant, note))
        if name in TESTS and (len(cells) != len(COLUMNS) or not as_expected(name, variant, note, cells)):
            wrong.append(f'not as expected: {line}')
    expected = list(rows())
    wrong += [f'no row: {row}' for row in expected if row not in found]
    wrong += [f'no such test: {row}' for row in found if row not in expected]
    if not wrong and found != expected:
        wrong.append('the rows are not in the order of the tests, or not once each')
    for line in wrong:
        print(line)
    if wrong:
        sys.exit(f'{len(wrong)} differences between table.txt and tests.py')
    print(f'table.txt: {len(TESTS)} tests, {len(found)} rows, all as expected')


if __name__ == '__main__':
    main()
