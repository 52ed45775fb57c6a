"""Prints the results of `run.sh` as a table: one row per test and variant, one column per model.

Usage: table.py FOLDER [PATTERN]
"""

import os
import sys

from tests import TESTS

# The column, the language of the test, and the model.
COLUMNS = [
    ('rc11', 'C', 'rc11'),
    ('c20', 'C', 'c20'),
    ('c20-lb', 'C', 'c20-lb'),
    ('A64', 'A64', 'aarch64'),
    ('LSE', 'LSE', 'aarch64'),
    ('RISCV', 'RISCV', 'riscv'),
    ('PPC', 'PPC', 'ppc'),
]
LEGEND = """\
-       forbidden in every execution, no data race
A       the bad outcome is allowed
race    a data race: undefined in the language
.       not run: too many executions for this model
t, E    over the time limit; an error of herd7
"""
UNEXPECTED = '<== unexpected'


def rows():
    """Test, variant, and the reason if the variant is expected to change nothing."""
    for name, test in TESTS.items():
        reasons = {id(change): reason for change, reason in test.keeps}
        for variant, change in test.variants():
            yield name, variant, reasons.get(id(change), '')


def as_expected(name, variant, reason, cells):
    """Whether these results are those that the tests expect."""
    run = {cell for cell, (_, language, _) in zip(cells, COLUMNS, strict=True) if language in TESTS[name].languages}
    if variant == 'strong' or reason:
        return run == {'-'}
    return any('A' in cell or 'race' in cell for cell in run) and not run & {'t', 'E', '.'}


def verdict(test, result):
    if not os.path.exists(result) or os.path.getmtime(result) < os.path.getmtime(test):
        return '.'
    return open(result).read().strip()


def line(name, variant, cells, note=''):
    return f'{name:30} {variant:44} ' + ''.join(f'{cell:8}' for cell in cells) + note


def main(folder, pattern=''):
    print(line('test', 'variant', [column for column, _, _ in COLUMNS], 'why it changes nothing').rstrip())
    runs = {'strong': 0, 'weakened': 0}
    unexpected = 0
    for name, variant, reason in rows():
        if pattern not in f'{name}.{variant}':
            continue
        cells = []
        for _, language, model in COLUMNS:
            test = f'{folder}/{language}/{name}.{variant}.litmus'
            cells.append(verdict(test, f'{test}.{model}') if language in TESTS[name].languages else '.')
        fine = as_expected(name, variant, reason, cells)
        unexpected += not fine
        runs['strong' if variant == 'strong' else 'weakened'] += sum(cell != '.' for cell in cells)
        print(line(name, variant, cells, reason if fine else UNEXPECTED).rstrip())
    print(f'\n{LEGEND}\n{runs["strong"]} strong runs, {runs["weakened"]} weakened; unexpected rows: {unexpected}')


if __name__ == '__main__':
    main(*sys.argv[1:])
