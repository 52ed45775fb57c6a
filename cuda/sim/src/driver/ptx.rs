//! Kernels as PTX text: their parameters, and which buffers they write. The text is not run.
//! Syntax: NVIDIA's "Parallel Thread Execution ISA".

use std::collections::{BTreeMap, BTreeSet};

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parameter {
    /// Where it begins in a buffer of all parameters.
    pub(super) offset: usize,
    /// Whether it is one integer of 64 bits, which may be an address.
    pub(super) address: bool,
    /// Whether the code stores at an address that it computes from this one, also in functions that it calls.
    pub(super) written: bool,
}

/// The parameters of an entry; `None` if the text has none of this name.
pub(super) fn parameters(text: &str, name: &str) -> Option<Vec<Parameter>> {
    let text = plain(text);
    let mut routines = BTreeMap::from([(name.to_owned(), Routine::find(&text, ".entry", name)?)]);
    let mut called = routines[name].calls();
    while let Some(callee) = called.pop() {
        if routines.contains_key(&callee) {
            continue;
        }
        if let Some(routine) = Routine::find(&text, ".func", &callee) {
            called.extend(routine.calls());
            routines.insert(callee, routine);
        }
    }
    // Functions may call each other in a circle: until nothing is new.
    loop {
        let flows: Vec<Flow> = routines.values().map(|routine| flow(routine, &routines)).collect();
        if routines.values().map(|routine| &routine.flow).eq(&flows) {
            break;
        }
        routines.values_mut().zip(flows).for_each(|(routine, flow)| routine.flow = flow);
    }
    let Routine { names, parameters, flow, .. } = routines.remove(name)?;
    let of = |(parameter, name)| Parameter { written: flow.written.contains(name), ..parameter };
    Some(parameters.into_iter().zip(&names).map(of).collect())
}

/// The text without comments, strings, and the lines that name a place in the source, which end without a semicolon.
fn plain(text: &str) -> String {
    let (mut plain, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(['/', '"']) {
        let (before, found) = rest.split_at(at);
        plain.push_str(before);
        let (length, end) = match found.as_bytes() {
            [b'/', b'/', ..] => (2, "\n"),
            [b'/', b'*', ..] => (2, "*/"),
            [b'"', ..] => (1, "\""),
            _ => (1, ""),
        };
        plain.push_str(if end == "\n" { end } else { " " });
        rest = found[length..].split_once(end).map_or("", |(_, rest)| rest);
    }
    plain.push_str(rest);
    let lines = plain.lines().filter(|line| line.split_whitespace().next() != Some(".loc"));
    let text = lines.collect::<Vec<_>>().join("\n");
    // A directive between the parameters and the code, which ends with a semicolon as a declaration does.
    let mut parts = text.split(".pragma");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.split_once(';').map_or("", |(_, rest)| rest))
}

/// An `.entry` or a `.func`.
struct Routine {
    /// Those of its parameters.
    names: Vec<String>,
    parameters: Vec<Parameter>,
    results: Vec<String>,
    statements: Vec<Statement>,
    /// As far as it is known.
    flow: Flow,
}

/// The parameters, [`MEMORY`] and [`NUMBER`], whose values reach some place.
type Sources = BTreeSet<String>;

/// Where the values of a routine's parameters go, and what its caller has put into memory.
#[derive(Default, PartialEq)]
struct Flow {
    /// Into addresses of stores.
    written: Sources,
    /// Into memory, where the caller may find them.
    kept: Sources,
    returned: Sources,
}

impl Routine {
    /// `None` if the text has no code of this name.
    fn find(text: &str, kind: &str, name: &str) -> Option<Self> {
        let (results, list, body) = text.split(kind).skip(1).find_map(|after| {
            let begin = after.find(['{', ';']).filter(|at| after[*at..].starts_with('{'))?;
            let (head, body) = after.split_at(begin);
            // A function's results come before its name.
            let head = head.trim_start();
            let (results, head) =
                head.strip_prefix('(').map_or(Some(("", head)), |head| head.split_once(')'))?;
            let (names, list) = head.split_once('(').unwrap_or((head, ""));
            let mut depth = 0;
            let end = body.find(|c: char| {
                depth += i32::from(c == '{') - i32::from(c == '}');
                depth == 0
            });
            let list = list.split(')').next()?;
            let body = &body[1..end.unwrap_or(body.len())];
            (names.split_whitespace().next() == Some(name)).then_some((results, list, body))
        })?;
        let (names, parameters) = declared(list).into_iter().unzip();
        let results = declared(results).into_iter().map(|(name, _)| name).collect();
        Some(Self { names, parameters, results, statements: statements(body), flow: Flow::default() })
    }

    /// The names of the functions that it calls.
    fn calls(&self) -> Vec<String> {
        let calls = self.statements.iter().filter(|statement| statement.operation.starts_with("call"));
        calls.filter_map(|call| Some(called(&call.operands)?.1.to_owned())).collect()
    }
}

/// The names and kinds of what a list declares: parameters, or results.
fn declared(list: &str) -> Vec<(String, Parameter)> {
    let mut end = 0_usize;
    let mut one = |declared: &str| {
        let (head, count) = declared.split_once('[').map_or((declared, None), |(head, count)| {
            (head, count.trim_end_matches(']').trim().parse::<usize>().ok())
        });
        let name = head.split(|c: char| c.is_whitespace()).rfind(|word| !word.is_empty())?;
        // Behind `.ptr` is the alignment of what it points to.
        let kind = head.split(".ptr").next()?.replace('.', " .");
        let number = |words: &str| words.split_whitespace().next()?.parse::<usize>().ok();
        let align = kind.split_once(".align").and_then(|(_, words)| number(words));
        let bytes = kind.split_whitespace().find_map(|word| number(word.strip_prefix('.')?.get(1..)?))? / 8;
        let offset = end.next_multiple_of(align.unwrap_or(1).max(bytes).max(1));
        end = offset + bytes * count.unwrap_or(1);
        let address = count.is_none() && [".u64", ".s64", ".b64"].iter().any(|wide| kind.contains(wide));
        Some((name.to_owned(), Parameter { offset, address, written: false }))
    };
    list.split(',').filter_map(|declared| one(declared.trim())).collect()
}

/// One of the operands of a statement, between commas: registers, and names of variables.
struct Operand {
    /// `[`: memory at an address. `(`: a list of a call. `{`: a vector.
    first: Option<char>,
    words: Vec<String>,
}

/// A statement: its operation with all its parts, and its operands.
struct Statement {
    operation: String,
    operands: Vec<Operand>,
}

/// The statements of a body, without predicates and labels.
fn statements(body: &str) -> Vec<Statement> {
    let (mut texts, mut text) = (Vec::new(), String::new());
    for c in body.chars() {
        match c {
            ';' => texts.push(std::mem::take(&mut text)),
            // Of a block, not of a vector.
            '{' | '}' if text.trim().is_empty() => {}
            // A label; all operations with a colon have a point before it.
            ':' if !text.trim().contains(|c: char| c == '.' || c.is_whitespace()) => text.clear(),
            c => text.push(c),
        }
    }
    // Each call declares its variables for arguments anew, mostly by the same names.
    let mut declared = BTreeMap::<String, usize>::new();
    let statement = |text: &String| {
        let mut rest = text.trim_start();
        if let Some(predicate) = rest.strip_prefix('@') {
            rest = word(predicate.trim_start_matches(|c: char| c == '!' || c.is_whitespace())).1;
        }
        let (operation, mut rest) = word(rest);
        let mut operation = operation.to_owned();
        while rest.trim_start().starts_with('.') {
            let (part, after) = word(rest);
            operation.push_str(part);
            rest = after;
        }
        if operation.starts_with(".param") {
            let name = rest.split('[').next().and_then(|declared| declared.split_whitespace().last());
            *declared.entry(name.unwrap_or_default().to_owned()).or_default() += 1;
        }
        // The default order of accesses, which some compilers write out.
        let operation = operation.replace(".weak", "");
        let renamed = |word: &str| {
            declared.get(word).map_or_else(|| word.to_owned(), |times| format!("{word} {times}"))
        };
        let operand = |text: &str| {
            let words = text.split(|c: char| c.is_whitespace() || ",[]{}()+|".contains(c));
            let words = words.filter(|word| !word.is_empty()).map(renamed).collect();
            Operand { first: text.trim_start().chars().next(), words }
        };
        let mut depth = 0;
        let operands = rest.split(|c: char| {
            depth += i32::from("[{(".contains(c)) - i32::from("]})".contains(c));
            c == ',' && depth == 0
        });
        Statement { operation, operands: operands.map(operand).collect() }
    };
    texts.iter().map(statement).collect()
}

/// The first word of a text, and what follows. A bracket ends a word too.
fn word(text: &str) -> (&str, &str) {
    let text = text.trim_start();
    text.split_at(text.find(|c: char| c.is_whitespace() || "[{(".contains(c)).unwrap_or(text.len()))
}

/// The results of a call, its function and its arguments; `None` without arguments.
fn called(operands: &[Operand]) -> Option<(&[String], &str, &Operand)> {
    let is_list = |operand: &&Operand| operand.first == Some('(');
    let name = operands.iter().find(|operand| !is_list(operand))?.words.first()?;
    let lists: Vec<&Operand> = operands.iter().filter(is_list).collect();
    match lists[..] {
        [results, arguments] => Some((&results.words, name, arguments)),
        [arguments] if !is_list(&operands.first()?) => Some((&[], name, arguments)),
        _ => None,
    }
}

/// Whether an operation writes at its first address, to memory that other kernels see or to that of the kernel: addresses of
/// the latter come from no parameter.
fn stores(operation: &str) -> bool {
    const STORES: [&str; 9] = [
        "st.",
        "red.",
        "atom.",
        "wmma.store.",
        "multimem.st.",
        "multimem.red.",
        "sust.",
        "sured.",
        "discard.",
    ];
    let others = ["tensormap.replace.", "cp.async.bulk.global.", "cp.reduce.async.bulk.global."];
    STORES.iter().chain(&others).any(|kind| operation.starts_with(kind)) && !operation.starts_with("st.param")
}

/// The name of a register for all values that a kernel stores in memory other than parameters. No PTX has this name.
const MEMORY: &str = "[";
/// The name for those of them that are at no [`place`].
const ELSEWHERE: &str = "[elsewhere";

/// The name for what is computed from addresses and may be a number, such as the remainder of one.
const NUMBER: &str = "[number";

/// The name of 64 bits at a fixed place on the stack. Code that is not optimised has all its variables there.
fn place(operation: &str, operand: &Operand) -> Option<String> {
    let words: Vec<&str> = operand.words.iter().map(String::as_str).collect();
    let offset = match words[..] {
        ["%SP" | "%SPL"] => "0",
        ["%SP" | "%SPL", offset] => offset,
        _ => return None,
    };
    let more = [".v2.", ".v4.", ".b128"].iter().any(|kind| operation.contains(kind));
    (!more).then(|| format!("{MEMORY}{offset}"))
}

/// Whether a result that is computed from addresses may be a number. Where that is not certain, it may: a difference of two
/// addresses that is taken for an address is a false report, the other way a race is missed.
fn may_be_number(statement: &Statement, is_known: impl Fn(&[Operand]) -> bool) -> bool {
    let Statement { operation, operands } = statement;
    let is_negative = |operand: &Operand| operand.words.iter().any(|word| word.starts_with('-'));
    match operation.split('.').next() {
        Some("mov" | "cvta" | "selp" | "add" | "sub") => false,
        Some("mad") => operands.get(1..3).is_some_and(is_known),
        // With such a mask, an address is aligned down.
        Some("and") => !operands.iter().any(is_negative),
        _ => true,
    }
}

/// Whether a result is a number that no address is: it is less than this one, which is far from any.
fn is_small(Statement { operation, operands }: &Statement) -> bool {
    let number = operands.last().and_then(|operand| operand.words.first()?.parse::<u16>().ok());
    number.is_some() && ["and.", "rem."].iter().any(|kind| operation.starts_with(kind))
}

/// Follows the values of a routine's parameters through registers, memory and calls. Values of fewer than 64 bits are not
/// followed through memory and parameters: they are no addresses.
fn flow(routine: &Routine, routines: &BTreeMap<String, Routine>) -> Flow {
    let names = routine.names.iter().map(String::as_str).chain([MEMORY, NUMBER]);
    let own: BTreeMap<String, Sources> =
        names.map(|name| (name.to_owned(), Sources::from([name.to_owned()]))).collect();
    let others = [MEMORY, NUMBER].map(str::to_owned);
    let (mut from, mut written, mut addresses) = (own.clone(), Sources::new(), Sources::new());
    // In a loop, a register may be used above its definition: until nothing is new.
    loop {
        let size = |from: &BTreeMap<_, Sources>| from.values().map(BTreeSet::len).sum::<usize>();
        let (before, mut converted) = ((size(&from), written.len()), Sources::new());
        for statement @ Statement { operation, operands } in &routine.statements {
            let of = |word: &str| from.get(word).cloned().unwrap_or_default();
            let sources = |operands: &[Operand]| {
                operands
                    .iter()
                    .flat_map(|operand| &operand.words)
                    .flat_map(|word| of(word))
                    .collect::<Sources>()
            };
            let wide = [".u64", ".s64", ".b64", ".b128"].iter().any(|kind| operation.ends_with(kind));
            let memory = operands.iter().position(|operand| operand.first == Some('['));
            let (mut new, mut kept, mut at) = (Sources::new(), Sources::new(), None);
            let to = match (memory, operands.first()) {
                _ if operation.starts_with("call") => {
                    let Some((results, name, arguments)) = called(operands) else { continue };
                    if let Some(Routine { names, flow, .. }) = routines.get(name) {
                        let given = arguments.words.iter().chain(&others);
                        for (given, name) in given.zip(names.iter().chain(&others)) {
                            let ways = [&mut written, &mut kept, &mut new];
                            for (to, from) in
                                ways.into_iter().zip([&flow.written, &flow.kept, &flow.returned])
                            {
                                to.extend(of(given).into_iter().filter(|_| from.contains(name)));
                            }
                        }
                    } else {
                        // What is behind an unknown function may write.
                        new = sources(std::slice::from_ref(arguments));
                        written.extend(new.iter().cloned());
                    }
                    results
                }
                (Some(address), Some(to)) if stores(operation) => {
                    written.extend(sources(&operands[address..=address]));
                    if wide {
                        at = place(operation, &operands[address]);
                        kept = sources(&operands[address + 1..]);
                        new = of(MEMORY);
                    }
                    // An atomic operation also loads.
                    if address == 1 { &to.words[..] } else { &[] }
                }
                (Some(0), Some(to)) if operation.starts_with("st.param") => {
                    new = sources(&operands[1..]);
                    to.words.get(..1).unwrap_or_default()
                }
                (Some(1), Some(to)) if operation.starts_with("ld") && wide => {
                    new = match place(operation, &operands[1]) {
                        _ if operation.starts_with("ld.param") => sources(&operands[1..]),
                        Some(place) => &of(&place) | &of(ELSEWHERE),
                        None => of(MEMORY),
                    };
                    &to.words
                }
                // A predicate is no address.
                (None, Some(to)) if !operation.starts_with("setp.") => {
                    new = sources(&operands[1..]);
                    if operation.starts_with("cvta.to.") && new.len() == 1 {
                        converted.extend(new.iter().filter(|name| !others.contains(name)).cloned());
                    }
                    if !new.is_empty() && is_small(statement) {
                        new = of(NUMBER);
                    } else if !new.is_empty()
                        && may_be_number(statement, |operands| !sources(operands).is_empty())
                    {
                        new.insert(NUMBER.to_owned());
                    }
                    // The difference of two addresses is none. That of an address and a number is one.
                    let subtracted =
                        if operation.starts_with("sub.") { sources(&operands[2..]) } else { Sources::new() };
                    let is_address = !subtracted.contains(NUMBER) && !subtracted.is_disjoint(&addresses);
                    if is_address { &[] } else { &to.words[..] }
                }
                _ => continue,
            };
            let to = to.iter().cloned().map(|to| (to, &new));
            let to_memory = [at.unwrap_or_else(|| ELSEWHERE.to_owned()), MEMORY.to_owned()];
            for (to, new) in to.chain(to_memory.map(|to| (to, &kept))) {
                from.entry(to).or_default().extend(new.iter().cloned());
            }
        }
        if before != (size(&from), written.len()) {
            continue;
        }
        if converted.is_subset(&addresses) {
            let returned = routine.results.iter().filter_map(|name| from.get(name)).flatten().cloned();
            let returned = returned.collect();
            return Flow { written, kept: from.remove(ELSEWHERE).unwrap_or_default(), returned };
        }
        // Once more, without their differences.
        addresses.extend(converted);
        (from, written) = (own.clone(), Sources::new());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
        .version 8.0
        .target sm_52
        .visible .entry first(.param .u64 first_param_0) { ret; }
        .visible .entry saxpy(
            .param .u64 saxpy_param_0,
            .param .u64 .ptr .align 1 saxpy_param_1,
            .param .f32 saxpy_param_2,
            .param .align 8 .b8 saxpy_param_3[16],
            .param .u64 saxpy_param_4
        )
        .maxntid 256, 1, 1
        {
            .reg .b64 %rd<9>;
            ld.param.u64 %rd1, [saxpy_param_0];
            ld.param.u64 %rd2, [saxpy_param_1];
            ld.param.u64 %rd8, [saxpy_param_4];
            cvta.to.global.u64 %rd3, %rd1;
            mul.wide.s32 %rd4, %r1, 4;
            add.s64 %rd5, %rd3, %rd4;
            cvta.to.global.u64 %rd6, %rd2;
            add.s64 %rd7, %rd6, %rd4;
            @%p1 bra $L_1;
        $L_1:
            ld.global.f32 %f1, [%rd7];
            st.global.f32 [%rd5+4], %f1;
            atom.global.add.u32 %r9, [%rd8], 1;
            ret;
        }
        .visible .entry none() { ret; }
        .visible .entry pragma(.param.u32 a, .param.u64 b) .pragma \"nounroll\", \"x\"; { ld.weak.param.u64 %rd1, [b]; ret; }";

    #[test]
    fn parameters_are_addresses_that_are_written_or_read() {
        let number = |offset| Parameter { offset, address: false, written: false };
        let read = |offset| Parameter { offset, address: true, written: false };
        let write = |offset| Parameter { offset, address: true, written: true };
        assert_eq!(
            parameters(TEXT, "saxpy"),
            Some(vec![write(0), read(8), number(16), number(24), write(40)])
        );
        assert_eq!(parameters(TEXT, "first"), Some(vec![read(0)]));
        assert_eq!(parameters(TEXT, "pragma"), Some(vec![number(0), read(8)]));
        assert_eq!(parameters(TEXT, "none"), Some(vec![]));
        assert_eq!((parameters(TEXT, "sax"), parameters("", "saxpy")), (None, None));
    }

    /// Functions, by their names, results and code, which has the argument in `%rd1`. nvcc calls their registers and arguments
    /// as those of the kernels.
    const FUNCTIONS: [(&str, &str, &str); 10] = [
        ("get", "(.param .b32 func_retval0)", "ld.u32 %r1, [%rd1]; st.param.b32 [func_retval0+0], %r1;"),
        (
            "put",
            "",
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; call.uni put, (param0); } st.u32 [%rd1], %r1;",
        ),
        ("next", RESULT, "add.s64 %rd2, %rd1, 8; st.param.b64 [func_retval0+0], %rd2;"),
        ("past", RESULT, "and.b64 %rd2, %rd1, 15; st.param.b64 [func_retval0+0], %rd2;"),
        (
            "look",
            "(.param .b32 func_retval0)",
            "ld.u32 %r1, [%rd1];
             { .param .b64 param0; st.param.b64 [param0+0], %rd1; .param .b32 retval0; call.uni (retval0), look, (param0); }",
        ),
        (
            "circle",
            "",
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; call.uni back, (param0); } st.u32 [%rd1], %r1;",
        ),
        ("back", "", "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; call.uni circle, (param0); }"),
        ("put_at", "", "ld.u64 %rd2, [%rd1]; st.u32 [%rd2], %r1;"),
        ("get_at", RESULT, "ld.u64 %rd2, [%rd1]; st.param.b64 [func_retval0+0], %rd2;"),
        (
            "keep",
            "",
            ".local .align 8 .b8 __local_depot0[8]; ld.param.u64 %rd2, [keep_param_1];
             st.u64 [%SP+0], %rd1; ld.u64 %rd3, [%SP+0]; st.u64 [%rd3], %rd2;",
        ),
    ];
    const RESULT: &str = "(.param .b64 func_retval0)";

    /// What a kernel with this code does with its two parameters, among other kernels and functions. The first one is in `%rd1`,
    /// and as an address of global memory in `%rd2`.
    fn writes(body: &str) -> [bool; 2] {
        let function = |(name, results, code): &(&str, &str, &str)| {
            let second = if *name == "keep" { ", .param .b64 keep_param_1" } else { "" };
            let code = format!("ld.param.u64 %rd1, [{name}_param_0]; {code} ret;");
            format!(".func {results} {name}(.param .b64 {name}_param_0{second})\n{{ {code} }}\n")
        };
        let [first, others @ ..] = FUNCTIONS.each_ref().map(function);
        let text = format!(
            ".func put(.param .b64 put_param_0);
            .visible .entry before(.param .u64 k_param_0) {{ ld.param.u64 %rd1, [k_param_0]; st.global.u32 [%rd1], %r1; ret; }}
            {first}
            .visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1)
            {{
                .reg .b64 %rd<9>;
                ld.param.u64 %rd1, [k_param_0];
                cvta.to.global.u64 %rd2, %rd1;
                {body}
                ret;
            }}
            {}",
            others.concat()
        );
        let found = parameters(&text, "k").unwrap();
        <[Parameter; 2]>::try_from(found).unwrap().map(|parameter| parameter.written)
    }

    #[test]
    fn a_kernel_writes_where_it_or_what_it_calls_stores() {
        let read = [
            "ld.global.u32 %r1, [%rd2];",
            "// st.global.u32 [%rd2], %r1;",
            "/* st.global.u32 [%rd2], %r1;\n st.global.u32 [%rd2], %r1; */",
            "st.shared.u32 [%rd3], %r1; st.local.u32 [%rd3], %rd1;",
            // Their values are no addresses.
            "st.shared.u32 [%rd3], %rd1; ld.shared.u32 %rd4, [%rd3]; st.global.u32 [%rd4], %r1;",
            "ld.global.u64 %rd4, [%rd2]; st.global.u32 [%rd4], %r1;",
            // Not optimised: all variables are on the stack.
            "st.u64 [%SP+0], %rd1; st.u64 [%SP+8], %rd7; ld.u64 %rd4, [%SP+8]; st.u32 [%rd4], %r1;",
            "st.u64 [%SP], %rd1; { .param .b64 param0; st.param.b64 [param0+0], %SP; .param .b64 retval0;
               call.uni (retval0), get_at, (param0); ld.param.b64 %rd4, [retval0+0]; } ld.u32 %r1, [%rd4];",
            "ld.param.u64 %rd4, [k_param_1]; sub.s64 %rd5, %rd4, %rd1; st.global.u32 [%rd6+%rd5], %r1;",
            "ld.param.u64 %rd4, [k_param_1]; and.b64 %rd3, %rd2, -16; mad.wide.s32 %rd3, %r1, 4, %rd3; sub.s64 %rd5, %rd4, %rd3;
             st.global.u32 [%rd6+%rd5], %r1;",
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; .param .b32 retval0; call.uni (retval0), look, (param0); }",
            "cp.async.ca.shared.global [%rd3], [%rd2], 16;",
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%rd3], [%rd2], 16, [%rd4];",
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; .param .b32 retval0;
               call.uni (retval0), get, (param0); ld.param.b32 %r1, [retval0+0]; }",
            // The second block's variable is another one.
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; call.uni (retval0), get, (param0); }
             { .param .b64 param0; st.param.b64 [param0+0], %rd7; call.uni put, (param0); }",
            "setp.ne.s64 %p1, %rd2, 0; selp.b64 %rd5, %rd6, %rd7, %p1; st.global.u32 [%rd5], 1;",
            // A small number that comes from an address, as an index into what is no parameter.
            "shr.u64 %rd3, %rd2, 4; and.b64 %rd4, %rd3, 1023; mad.lo.s64 %rd5, %rd4, 8, %rd6; st.global.u32 [%rd5], %r1;",
            "rem.u64 %rd4, %rd1, 61; add.s64 %rd5, %rd6, %rd4; st.global.u32 [%rd5], %r1;",
        ];
        let written = [
            "st.global.u32 [%rd2], %r1;",
            "st.u32[%rd1],%r1;",
            "@%p1 st.global.v4.f32 [%rd2], {%f1, %f2, %f3, %f4};",
            "L1:st.global.u32 [%rd2], %r1;",
            "{st.global.u32 [%rd2], %r1;}",
            "$L1: { st.global.u32 [%rd2], %r1; }",
            "/* a */st.global.u32 [%rd2], %r1;",
            "st\t.global.u32 [%rd2], %r1;",
            ".loc 1 7 3\n st.global.u32 [%rd2], %r1;",
            "atom.add.u32 %r1, [%rd1], 1;",
            "atom.global.v2.f32.add {%f1, %f2}, [%rd2], {%f3, %f4};",
            "red.global.add.u32 [%rd2], 1;",
            "multimem.st.relaxed.sys.global.u32 [%rd2], %r1;",
            "multimem.red.relaxed.sys.global.add.u32 [%rd2], %r1;",
            "wmma.store.d.sync.aligned.m16n16k16.global.row.f32 [%rd2], {%f1, %f1, %f1, %f1, %f1, %f1, %f1, %f1};",
            "sust.b.1d.b32.trap [%rd2, {%r1}], {%r1};",
            "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%rd3], 16;",
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd2], [%rd3], 16;",
            "mov.b64 {%r1, %r2}, %rd1; mov.b64 %rd3, {%r1, %r2}; st.global.u32 [%rd3], %r1;",
            "ld.param.v2.u64 {%rd5, %rd6}, [k_param_0]; st.global.u32 [%rd6], %r1;",
            "$L: mov.u64 %rd8, %rd7; mov.u64 %rd7, %rd6; st.global.u32 [%rd8], %r1; mov.u64 %rd6, %rd4; mov.u64 %rd4, %rd3;
             mov.u64 %rd3, %rd2; @%p1 bra $L;",
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; call.uni put, (param0); }",
            "@ %p1 st.global.u32 [%rd2], %r1;",
            "@ ! %p1 st.global.u32 [%rd2], %r1;",
            "ld.weak.param.u64 %rd5, [k_param_0]; st.weak.global.u32 [%rd5], %r1;",
            "sured.b.add.1d.u32.trap [%rd2, {%r1}], %r1;",
            "discard.global.L2 [%rd2], 128;",
            "tensormap.replace.tile.rank.global.b1024.b32 [%rd2], 1;",
            // Through memory.
            "st.local.v2.u64 [%rd3], {%rd6, %rd1}; ld.local.u64 %rd4, [%rd7]; st.u32 [%rd4], %r1;",
            "st.shared.u64 [p], %rd1; ld.shared.u64 %rd4, [p]; st.u32 [%rd4], %r1;",
            "st.u64 [%SP+0], %rd1; ld.u64 %rd4, [%SP+0]; st.u32 [%rd4], %r1;",
            "st.local.v2.u64 [%SPL+0], {%rd7, %rd1}; ld.u64 %rd4, [%SP+8]; st.u32 [%rd4], %r1;",
            "st.u64 [%SP+8], %rd1; ld.v2.u64 {%rd3, %rd4}, [%SP+0]; st.u32 [%rd4], %r1;",
            "atom.exch.b64 %rd3, [%rd7], %rd1; atom.exch.b64 %rd4, [%rd7], 0; st.u32 [%rd4], %r1;",
            "st.u64 [%SP+0], %rd1; { .param .b64 param0; st.param.b64 [param0+0], %SP; call.uni put_at, (param0); }",
            "st.u64 [%SP+0], %rd1; { .param .b64 param0; st.param.b64 [param0+0], %SP; .param .b64 retval0;
               call.uni (retval0), get_at, (param0); ld.param.b64 %rd4, [retval0+0]; } st.u32 [%rd4], %r1;",
            "{ .param .b64 param0; st.param.b64 [param0+0], %SP; .param .b64 param1; st.param.b64 [param1+0], %rd1;
               call.uni keep, (param0, param1); } ld.u64 %rd4, [%SP+0]; st.u32 [%rd4], %r1;",
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; call.uni circle, (param0); }",
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; call.uni back, (param0); }",
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; call.uni unknown, (param0); }",
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; call (retval0), %rd5, (param0), prototype_0; }",
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; .param .b64 retval0;
               call.uni (retval0), next, (param0); ld.param.b64 %rd5, [retval0+0]; } st.u32 [%rd5], 1;",
            // A pointer that is aligned: what is subtracted comes from an address, and is none.
            "and.b64 %rd3, %rd2, 15; sub.s64 %rd4, %rd2, %rd3; st.global.u32 [%rd4], %r1;",
            "rem.u64 %rd3, %rd1, %rd7; sub.s64 %rd4, %rd2, %rd3; st.global.u32 [%rd4], %r1;",
            "shr.u64 %rd3, %rd1, 4; mad.lo.s64 %rd4, %rd3, -16, %rd1; sub.s64 %rd5, %rd2, %rd4; st.u32 [%rd5], %r1;",
            "shr.u64 %rd3, %rd1, 4; mul.lo.s64 %rd4, %rd3, 16; sub.s64 %rd5, %rd1, %rd4; sub.s64 %rd6, %rd2, %rd5;
             st.u32 [%rd6], %r1;",
            "and.b64 %rd3, %rd1, 15; selp.b64 %rd4, %rd3, 0, %p1; st.u64 [%SP+0], %rd4; st.u64 [%rd7], %rd1;
             ld.u64 %rd5, [%SP+0]; sub.s64 %rd6, %rd2, %rd5; st.u32 [%rd6], %r1;",
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; .param .b64 retval0; call.uni (retval0), past, (param0);
               ld.param.b64 %rd5, [retval0+0]; } sub.s64 %rd6, %rd2, %rd5; st.u32 [%rd6], %r1;",
        ];
        for (bodies, wanted) in [(&read[..], false), (&written[..], true)] {
            for body in bodies {
                assert_eq!(writes(body), [wanted, false], "{body}");
            }
        }
        // The second parameter may be a number.
        let minus = "ld.param.u64 %rd4, [k_param_1]; sub.s64 %rd5, %rd2, %rd4; st.global.u32 [%rd5], %r1;";
        assert!(writes(minus)[0]);
    }
}
