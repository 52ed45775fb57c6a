"""Writes the tests of `tests.py` as litmus files for herd7: C, AArch64 (LL/SC; LSE), RISC-V and PowerPC.

Usage: gen.py FOLDER [PATTERN]. Writes the tests whose name contains PATTERN, and prints the paths.

A test is a list of threads; a thread is a list of steps. The machines get the instructions that rustc generates for
`core`: see the comments at the classes.
"""

import os
import re
import sys

from steps import LOST, UNSET, Cas, Compute, If, Load, Read, Rmw, Set, Store, Write, registers, resolve, walk
from tests import ORDERS, TESTS

C_ORDER = {'rlx': 'relaxed', 'acq': 'acquire', 'rel': 'release', 'acqrel': 'acq_rel'}


def mo(order):
    return f'memory_order_{C_ORDER[order]}'


def acquires(order):
    return order in ('acq', 'acqrel')


def releases(order):
    return order in ('rel', 'acqrel')


class C:
    def emit(self, name, test, threads):
        inits, bodies = dict(test.init), []
        for i, steps in enumerate(threads):
            self.thread, self.expected, self.locs = i, {}, {}
            # Reading an expected value back costs an event: do it only if the test checks it.
            self.used = {s.reg for s in walk(steps) if isinstance(s, If)}
            self.used |= {reg for thread, reg in re.findall(r'\b(\d+):(\w+)', test.bad) if int(thread) == i}
            body = self.block(steps, '  ')
            params = [f'{kind}* {loc}' for loc, kind in sorted(self.locs.items())]
            params += [f'int* {e}' for e in self.expected]
            decl = ''.join(f'  int {r} = {UNSET};\n' for r in registers(steps))
            bodies.append(f'P{i}({", ".join(params)}) {{\n{decl}{body}}}\n')
            inits |= self.expected
        init = '\n'.join(f'{loc} = {value};' for loc, value in inits.items())
        return f'C {name}\n{{\n{init}\n}}\n\n' + '\n'.join(bodies) + f'\nexists ({test.bad})\n'

    def atomic(self, loc):
        self.locs[loc] = 'atomic_int'
        return loc

    def block(self, steps, indent):
        lines = []
        for s in steps:
            for line in self.step(s, indent):
                lines.append(f'{indent}{line}\n')
        return ''.join(lines)

    def step(self, s, indent):
        match s:
            case Load(reg, loc, order):
                yield f'{reg} = atomic_load_explicit({self.atomic(loc)},{mo(order)});'
            case Store(loc, value, order):
                yield f'atomic_store_explicit({self.atomic(loc)},{value},{mo(order)});'
            case Read(reg, loc):
                self.locs.setdefault(loc, 'int')
                yield f'{reg} = *{loc};'
            case Write(loc, value):
                self.locs.setdefault(loc, 'int')
                yield f'*{loc} = {value};'
            case Set(reg, value):
                yield f'{reg} = {value};'
            case Compute(op, reg, source, value):
                yield f'{reg} = ({source} {dict([("or", "|"), ("add", "+")])[op]} {value});'
            case Cas(ok, old, loc, expected, new, success, failure):
                e = f'e{self.thread}{len(self.expected)}'
                self.expected[e] = expected
                args = f'{self.atomic(loc)},{e},{new},{mo(success)},{mo(failure)}'
                yield f'{ok} = atomic_compare_exchange_strong_explicit({args});'
                if old in self.used:
                    yield f'{old} = *{e};'
            case Rmw(op, reg, loc, value, order):
                call = {'or': 'fetch_or', 'add': 'fetch_add', 'swap': 'exchange'}[op]
                yield f'{reg} = atomic_{call}_explicit({self.atomic(loc)},{value},{mo(order)});'
            case If(reg, value, then, otherwise):
                yield (
                    f'if ({reg} == {value}) {{\n'
                    + self.block(then, indent + '  ')
                    + indent
                    + '}'
                    + (' else {\n' + self.block(otherwise, indent + '  ') + indent + '}' if otherwise else '')
                )


class Machine:
    """One column of instructions for each thread. Subclasses define the instructions."""

    arch: str
    values: list  # registers
    addresses: list

    def emit(self, name, test, threads):
        inits = [f'{loc}={value};' for loc, value in test.init.items()]
        columns, names = [], {}
        for i, steps in enumerate(threads):
            self.thread, self.out, self.labels, self.where = i, [f'P{i}'], 0, {}
            regs = registers(steps)
            self.regs = dict(zip([*regs, ' a', ' b'], self.values, strict=False))
            assert len(self.regs) == len(regs) + 2, f'{name}: too few registers'
            self.block(steps)
            columns.append(self.out)
            inits += [f'{i}:{self.full(self.regs[r])}={UNSET};' for r in regs]
            inits += [f'{i}:{reg}={loc};' for loc, reg in self.where.items()]
            names |= {f'{i}:{r}': f'{i}:{self.full(self.regs[r])}' for r in regs}
        # A register that a weakened test no longer has counts as never set.
        bad = re.sub(r'\d+:\w+', lambda m: names[m[0]], test.bad)
        width = [max(map(len, c)) for c in columns]
        rows = [
            ' | '.join((c[r] if r < len(c) else '').ljust(w) for c, w in zip(columns, width, strict=True)) + ' ;'
            for r in range(max(map(len, columns)))
        ]
        return f'{self.arch} {name}\n{{\n' + '\n'.join([*inits, '}', *rows]) + f'\nexists ({bad})\n'

    def full(self, reg):
        """The register's name outside of instructions."""
        return reg

    def put(self, *lines):
        self.out += lines

    def label(self):
        self.labels += 1
        return f'L{self.thread}{self.labels}'

    def at(self, loc):
        return self.where.setdefault(loc, self.addresses[len(self.where)])

    def block(self, steps):
        a = self.regs[' a']
        for s in steps:
            match s:
                case Load(reg, loc, order):
                    self.load(self.regs[reg], self.at(loc), order)
                case Read(reg, loc):
                    self.load(self.regs[reg], self.at(loc), 'rlx')
                case Store(loc, str(reg), order):
                    self.store(self.regs[reg], self.at(loc), order)
                case Store(loc, value, order):
                    self.move(a, value)
                    self.store(a, self.at(loc), order)
                case Write(loc, value):
                    self.move(a, value)
                    self.store(a, self.at(loc), 'rlx')
                case Set(reg, value):
                    self.move(self.regs[reg], value)
                case Compute(op, reg, source, value):
                    self.compute(op, self.regs[reg], self.regs[source], value)
                case Cas(ok, old, loc, expected, new, success, failure):
                    self.cas(self.regs[ok], self.regs[old], self.at(loc), expected, new, success, failure)
                case Rmw(op, reg, loc, value, order):
                    self.rmw(op, self.regs[reg], self.at(loc), value, order)
                case If(reg, value, then, otherwise):
                    end = self.label()
                    other = self.label() if otherwise else end
                    self.branch_unless(self.regs[reg], value, other)
                    self.block(then)
                    if otherwise:
                        self.jump(end)
                        self.put(f'{other}:')
                        self.block(otherwise)
                    self.put(f'{end}:')

    # An exchange as a linked load and a conditional store, for machines that have no instruction for it.

    def cas(self, ok, old, at, expected, new, success, failure):
        a = self.regs[' a']
        end, won = self.label(), self.label()
        self.move(ok, 0)
        self.linked(old, at, acquires(success) or acquires(failure))
        self.branch_unless(old, expected, end)
        self.barrier(releases(success))
        self.move(a, new)
        self.conditional(a, at, releases(success), won)
        self.move(old, LOST)
        self.jump(end)
        self.put(f'{won}:')
        self.move(ok, 1)
        self.barrier(acquires(success))
        self.failed(end, acquires(failure))

    def rmw(self, op, reg, at, value, order):
        a, won = self.regs[' a'], self.label()
        self.barrier(releases(order))
        self.linked(reg, at, acquires(order))
        self.compute(op, a, reg, value)
        self.conditional(a, at, releases(order), won)
        self.move(reg, LOST)
        self.put(f'{won}:')
        self.barrier(acquires(order))

    def barrier(self, needed):
        """Where the load and the store have no ordering of their own."""

    def failed(self, end, acquire):
        self.put(f'{end}:')


class AArch64(Machine):
    arch = 'AArch64'
    values = [f'W{n}' for n in range(19)]
    addresses = [f'X{n}' for n in range(20, 29)]
    load_acquire = 'LDAR'

    def full(self, reg):
        return 'X' + reg[1:]

    def move(self, reg, value):
        self.put(f'MOV {reg},#{value}')

    def load(self, reg, at, order):
        self.put(f'{self.load_acquire if acquires(order) else "LDR"} {reg},[{at}]')

    def store(self, reg, at, order):
        self.put(f'{"STLR" if releases(order) else "STR"} {reg},[{at}]')

    def branch_unless(self, reg, value, label):
        self.put(f'CMP {reg},#{value}', f'B.NE {label}')

    def jump(self, label):
        self.put(f'B {label}')

    def compute(self, op, reg, source, value):
        b = self.regs[' b']
        if op == 'swap':
            self.move(reg, value)
        elif op == 'or':
            self.move(b, value)
            self.put(f'ORR {reg},{source},{b}')
        else:
            self.put(f'ADD {reg},{source},#{value}' if value >= 0 else f'SUB {reg},{source},#{-value}')


class AArch64LlSc(AArch64):
    """LDXR and STXR, with acquire loads as LDAR. The load acquires if either ordering does."""

    def linked(self, reg, at, acquire):
        self.put(f'{"LDAXR" if acquire else "LDXR"} {reg},[{at}]')

    def conditional(self, reg, at, release, won):
        b = self.regs[' b']
        self.put(f'{"STLXR" if release else "STXR"} {b},{reg},[{at}]', f'CBZ {b},{won}')


class AArch64Lse(AArch64):
    """Armv8.1 atomics, with acquire loads as the weaker LDAPR (Armv8.3)."""

    load_acquire = 'LDAPR'

    def cas(self, ok, old, at, expected, new, success, failure):
        a = self.regs[' a']
        end = self.label()
        suffix = ('A' if acquires(success) or acquires(failure) else '') + ('L' if releases(success) else '')
        self.move(ok, 0)
        self.move(old, expected)
        self.move(a, new)
        self.put(f'CAS{suffix} {old},{a},[{at}]')
        self.branch_unless(old, expected, end)
        self.move(ok, 1)
        self.put(f'{end}:')

    def rmw(self, op, reg, at, value, order):
        a, b = self.regs[' a'], self.regs[' b']
        suffix = ('A' if acquires(order) else '') + ('L' if releases(order) else '')
        if value < 0:
            self.move(b, 0)
            self.put(f'SUB {a},{b},#{-value}')
        else:
            self.move(a, value)
        self.put({'or': 'LDSET', 'add': 'LDADD', 'swap': 'SWP'}[op] + f'{suffix} {a},{reg},[{at}]')


class RiscV(Machine):
    """The psABI's mapping: fences around plain loads and stores, `.aq` and `.rl` on read-modify-writes."""

    arch = 'RISCV'
    values = [f'x{n}' for n in range(5, 20)]
    addresses = [f'x{n}' for n in range(20, 29)]

    def move(self, reg, value):
        self.put(f'addi {reg},x0,{value}' if value < 0 else f'ori {reg},x0,{value}')

    def load(self, reg, at, order):
        self.put(f'lw {reg},0({at})')
        if acquires(order):
            self.put('fence r,rw')

    def store(self, reg, at, order):
        if releases(order):
            self.put('fence rw,w')
        self.put(f'sw {reg},0({at})')

    def branch_unless(self, reg, value, label):
        a = self.regs[' a']
        self.move(a, value)
        self.put(f'bne {reg},{a},{label}')

    def jump(self, label):
        self.put(f'beq x0,x0,{label}')

    def compute(self, op, reg, source, value):
        if op == 'swap':
            self.move(reg, value)
        else:
            self.put(f'{"ori" if op == "or" else "addi"} {reg},{source},{value}')

    def linked(self, reg, at, acquire):
        self.put(f'lr.w{".aq" if acquire else ""} {reg},({at})')

    def conditional(self, reg, at, release, won):
        b = self.regs[' b']
        self.put(f'sc.w{".rl" if release else ""} {b},{reg},({at})', f'beq {b},x0,{won}')

    def rmw(self, op, reg, at, value, order):
        a = self.regs[' a']
        suffix = ('.aq' if acquires(order) else '') + ('.rl' if releases(order) else '')
        self.move(a, value)
        self.put({'or': 'amoor.w', 'add': 'amoadd.w', 'swap': 'amoswap.w'}[op] + f'{suffix} {reg},{a},({at})')


class PowerPc(Machine):
    """`lwsync` before a release and after an acquiring read-modify-write; a control dependency and `isync` after an
    acquire load."""

    arch = 'PPC'
    values = [f'r{n}' for n in range(3, 20)]
    addresses = [f'r{n}' for n in range(20, 29)]

    def move(self, reg, value):
        self.put(f'li {reg},{value}')

    def load(self, reg, at, order):
        self.put(f'lwz {reg},0({at})')
        if acquires(order):
            label = self.label()
            self.put(f'cmpw {reg},{reg}', f'bne {label}', f'{label}:', 'isync')

    def store(self, reg, at, order):
        self.barrier(releases(order))
        self.put(f'stw {reg},0({at})')

    def branch_unless(self, reg, value, label):
        self.put(f'cmpwi {reg},{value}', f'bne {label}')

    def jump(self, label):
        self.put(f'b {label}')

    def compute(self, op, reg, source, value):
        b = self.regs[' b']
        if op == 'swap':
            self.move(reg, value)
        elif op == 'or':
            self.move(b, value)
            self.put(f'or {reg},{source},{b}')
        else:
            self.put(f'addi {reg},{source},{value}')

    def linked(self, reg, at, acquire):
        self.put(f'lwarx {reg},r0,{at}')

    def conditional(self, reg, at, release, won):
        self.put(f'stwcx. {reg},r0,{at}', f'beq {won}')

    def barrier(self, needed):
        if needed:
            self.put('lwsync')

    def failed(self, end, acquire):
        if not acquire:
            return super().failed(end, acquire)
        done = self.label()
        self.jump(done)
        self.put(f'{end}:', 'lwsync', f'{done}:')


# The slowest ones last.
WRITERS = {'C': C, 'A64': AArch64LlSc, 'RISCV': RiscV, 'PPC': PowerPc, 'LSE': AArch64Lse}


def main(folder, pattern=''):
    for language, writer in WRITERS.items():
        os.makedirs(f'{folder}/{language}', exist_ok=True)
        for name, test in TESTS.items():
            for variant, changed in test.variants():
                full = f'{name}.{variant}'
                if pattern not in full or language not in test.languages:
                    continue
                threads = [resolve(steps, ORDERS | changed) for steps in test.threads]
                path, text = f'{folder}/{language}/{full}.litmus', writer().emit(full, test, threads)
                # An unchanged file keeps its time, and thus its results.
                if not os.path.exists(path) or open(path).read() != text:
                    with open(path, 'w') as f:
                        f.write(text)
                print(path)


if __name__ == '__main__':
    main(*sys.argv[1:])
