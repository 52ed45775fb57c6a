"""The steps of a litmus test, and the effect of a setting on them.

A compare-exchange has one attempt. If its store fails (LL/SC), the old value reads 98. A register that is not set on
the path taken reads 99.
"""

from dataclasses import make_dataclass, replace

LANGUAGES = ('C', 'A64', 'LSE', 'RISCV', 'PPC')
UNSET, LOST = 99, 98

# Atomic. The value that is stored is a number or a register.
Load = make_dataclass('Load', ['reg', 'loc', 'order'])
Store = make_dataclass('Store', ['loc', 'value', 'order'])
# Of plain data.
Read = make_dataclass('Read', ['reg', 'loc'])
Write = make_dataclass('Write', ['loc', 'value'])
# Of registers.
Set = make_dataclass('Set', ['reg', 'value'])
Compute = make_dataclass('Compute', ['op', 'reg', 'source', 'value'])
# A compare-exchange: `ok` is 1 or 0, `old` the value found. Without `old`, the value is ignored.
Cas = make_dataclass('Cas', ['ok', 'old', 'loc', 'expected', 'new', 'success', 'failure'])
# The operation is 'or', 'add' or 'swap'.
Rmw = make_dataclass('Rmw', ['op', 'reg', 'loc', 'value', 'order'])
# Lists of steps.
If = make_dataclass('If', ['reg', 'value', 'then', 'otherwise'])


def resolve(steps, knobs):
    """The steps with each knob replaced by its setting. Two settings change the step itself: `torn` turns a
    read-modify-write into a load and a store, `load` keeps only the load. An `If` on a knob is decided here."""

    def setting(name):
        return knobs.get(name, name)

    out = []
    for s in steps:
        if isinstance(s, If) and s.reg in knobs:
            out += resolve(s.then if knobs[s.reg] == s.value else s.otherwise, knobs)
        elif isinstance(s, If):
            out.append(If(s.reg, setting(s.value), resolve(s.then, knobs), resolve(s.otherwise, knobs)))
        elif isinstance(s, Cas):
            success, failure = setting(s.success), setting(s.failure)
            if success in ('torn', 'load'):
                store = [Store(s.loc, s.new, 'rel')] if success == 'torn' else []
                out += [Set(s.ok, 0), Load(s.old, s.loc, failure), If(s.old, s.expected, [*store, Set(s.ok, 1)], [])]
            else:
                out.append(Cas(s.ok, s.old, s.loc, s.expected, s.new, success, failure))
        elif isinstance(s, Rmw) and setting(s.order) == 'torn':
            out += [Load(s.reg, s.loc, 'rlx'), Compute(s.op, 'new', s.reg, s.value), Store(s.loc, 'new', 'rel')]
        elif isinstance(s, (Rmw, Load, Store)):
            out.append(replace(s, order=setting(s.order)))
        else:
            out.append(s)
    return out


def walk(steps):
    for s in steps:
        yield s
        if isinstance(s, If):
            yield from walk(s.then)
            yield from walk(s.otherwise)


def registers(steps):
    """In the order of their first use, without repetition."""
    names = []
    for s in walk(steps):
        if isinstance(s, Cas):
            names += [s.ok, s.old]
        elif hasattr(s, 'reg') and not isinstance(s, If):
            names.append(s.reg)
    return list(dict.fromkeys(names))
