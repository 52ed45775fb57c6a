//! Kernels as PTX text: their parameters, and which buffers they write. They are not run.
//! Syntax: NVIDIA's "Parallel Thread Execution ISA".

use std::collections::{BTreeMap, BTreeSet};

/// A parameter of a kernel, or of a function that it calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parameter {
    /// Whether it is one integer of 64 bits, which may be an address.
    pub(super) address: bool,
    /// Whether the code stores at an address that it computes from this one in registers, also in functions that it calls.
    pub(super) written: bool,
}

/// The parameters of the functions looked at; `None` inside for one that the text only declares or that calls itself.
type Known = BTreeMap<String, Option<Vec<Parameter>>>;

/// The parameters of an entry; `None` if the text has none of this name.
pub(super) fn parameters(text: &str, name: &str) -> Option<Vec<Parameter>> {
    routine(&plain(text), ".entry", name, &mut Known::new())
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
    lines.collect::<Vec<_>>().join("\n")
}

/// The parameters of an `.entry` or a `.func`; `None` if the text has no code of this name.
fn routine(text: &str, kind: &str, name: &str, known: &mut Known) -> Option<Vec<Parameter>> {
    if let Some(known) = known.get(name) {
        return known.clone();
    }
    known.insert(name.to_owned(), None);
    let (list, body) = text.split(kind).skip(1).find_map(|after| {
        let begin = after.find(['{', ';']).filter(|at| after[*at..].starts_with('{'))?;
        let (head, body) = after.split_at(begin);
        // A function's results come before its name.
        let head = head.trim_start();
        let head = if head.starts_with('(') { head.split_once(')')?.1 } else { head };
        let (names, list) = head.split_once('(').unwrap_or((head, ""));
        let mut depth = 0;
        let end = body.find(|c: char| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            depth == 0
        });
        let list = list.split(')').next()?;
        (names.split_whitespace().next() == Some(name)).then(|| (list, &body[1..end.unwrap_or(body.len())]))
    })?;
    let declared: Vec<&str> = list.split(',').map(str::trim).filter(|one| !one.is_empty()).collect();
    let name_of = |declared: &str| declared.split_whitespace().last().map(str::to_owned);
    let names: Vec<String> = declared.iter().filter_map(|one| name_of(one)).collect();
    let written = written(&statements(body), &names, &mut |callee| routine(text, ".func", callee, known));
    let one = |(declared, name): (&&str, &String)| {
        let wide =
            [".u64", ".s64", ".b64"].iter().any(|kind| declared.split_whitespace().any(|word| word == *kind));
        Parameter { address: wide && !name.contains('['), written: written.contains(name) }
    };
    let parameters: Vec<Parameter> = declared.iter().zip(&names).map(one).collect();
    known.insert(name.to_owned(), Some(parameters.clone()));
    Some(parameters)
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
        let (mut operation, mut rest) = word(text);
        if operation.starts_with('@') {
            (operation, rest) = word(rest);
        }
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

/// Whether an operation writes to memory that other kernels see, or may see, at its first address.
fn stores(operation: &str) -> bool {
    const STORES: [&str; 7] =
        ["st.", "red.", "atom.", "wmma.store.", "multimem.st.", "multimem.red.", "sust."];
    let bulk = ["cp.async.bulk.global.", "cp.reduce.async.bulk.global."];
    STORES.iter().chain(&bulk).any(|kind| operation.starts_with(kind)) && !operation.starts_with("st.param")
}

/// The parameters that the addresses of stores come from, through registers. `callee` knows the parameters of a function.
fn written(
    statements: &[Statement],
    names: &[String],
    callee: &mut dyn FnMut(&str) -> Option<Vec<Parameter>>,
) -> BTreeSet<String> {
    let own = |name: &String| (name.clone(), BTreeSet::from([name.clone()]));
    let mut from: BTreeMap<String, BTreeSet<String>> = names.iter().map(own).collect();
    let mut written = BTreeSet::new();
    // In a loop, a register may be used above its definition: until nothing is new.
    loop {
        let size = |from: &BTreeMap<_, BTreeSet<String>>| from.values().map(BTreeSet::len).sum::<usize>();
        let before = (size(&from), written.len());
        for Statement { operation, operands } in statements {
            let sources = |operands: &[Operand]| {
                let words = operands.iter().flat_map(|operand| &operand.words);
                words.filter_map(|word| from.get(word)).flatten().cloned().collect::<BTreeSet<_>>()
            };
            let memory = operands.iter().position(|operand| operand.first == Some('['));
            let (to, new) = if operation.starts_with("call") {
                let Some((results, name, arguments)) = called(operands) else { continue };
                let parameters = callee(name);
                for (i, argument) in arguments.words.iter().enumerate() {
                    // What is behind an unknown function may write.
                    let writes = parameters.as_ref().and_then(|all| all.get(i)).is_none_or(|one| one.written);
                    written.extend(from.get(argument).filter(|_| writes).into_iter().flatten().cloned());
                }
                (results, sources(std::slice::from_ref(arguments)))
            } else {
                match (memory, operands.first()) {
                    (Some(at), _) if stores(operation) => {
                        written.extend(sources(&operands[at..=at]));
                        continue;
                    }
                    (Some(_), Some(to)) if operation.starts_with("ld.param") => {
                        (&to.words[..], sources(&operands[1..]))
                    }
                    (Some(0), Some(to)) if operation.starts_with("st.param") => {
                        (to.words.get(..1).unwrap_or_default(), sources(&operands[1..]))
                    }
                    // A predicate is no address, and addresses in memory are not followed.
                    (None, Some(to)) if !operation.starts_with("setp.") => {
                        (&to.words[..], sources(&operands[1..]))
                    }
                    _ => continue,
                }
            };
            for to in to {
                from.entry(to.clone()).or_default().extend(new.iter().cloned());
            }
        }
        if before == (size(&from), written.len()) {
            return written;
        }
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
        .visible .entry none() { ret; }";

    #[test]
    fn parameters_are_addresses_that_are_written_or_read() {
        let number = Parameter { address: false, written: false };
        let read = Parameter { address: true, written: false };
        let write = Parameter { address: true, written: true };
        assert_eq!(parameters(TEXT, "saxpy"), Some(vec![write, read, number, number, write]));
        assert_eq!(parameters(TEXT, "first"), Some(vec![read]));
        assert_eq!(parameters(TEXT, "none"), Some(vec![]));
        assert_eq!((parameters(TEXT, "sax"), parameters("", "saxpy")), (None, None));
    }

    /// A function that stores at its argument, and one that loads from it. nvcc calls their registers and arguments as those
    /// of the kernels. And a kernel that begins as those in the tests below.
    const FUNCTIONS: &str = "
        .func put(.param .b64 put_param_0);
        .visible .entry before(.param .u64 k_param_0) { ld.param.u64 %rd1, [k_param_0]; st.global.u32 [%rd1], %r1; ret; }
        .func (.param .b32 func_retval0) get(.param .b64 get_param_0)
        {
            ld.param.u64 %rd1, [get_param_0];
            ld.u32 %r1, [%rd1];
            st.param.b32 [func_retval0+0], %r1;
            ret;
        }
        .visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1)
        {
            .reg .b64 %rd<9>;
            ld.param.u64 %rd1, [k_param_0];
            cvta.to.global.u64 %rd2, %rd1;
            BODY
            ret;
        }
        .func put(.param .b64 put_param_0)
        {
            ld.param.u64 %rd1, [put_param_0];
            { .param .b64 param0; st.param.b64 [param0+0], %rd1; call.uni put, (param0); }
            st.u32 [%rd1], %r1;
            ret;
        }
        .func (.param .b64 func_retval0) next(.param .b64 next_param_0)
        {
            ld.param.u64 %rd1, [next_param_0];
            add.s64 %rd2, %rd1, 8;
            st.param.b64 [func_retval0+0], %rd2;
            ret;
        }";

    #[test]
    fn a_kernel_writes_where_it_or_what_it_calls_stores() {
        let reads = [
            "ld.global.u32 %r1, [%rd2];",
            "// st.global.u32 [%rd2], %r1;",
            "/* st.global.u32 [%rd2], %r1;\n st.global.u32 [%rd2], %r1; */",
            "st.shared.u32 [%rd3], %r1; st.local.u32 [%rd3], %rd1;",
            "cp.async.ca.shared.global [%rd3], [%rd2], 16;",
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%rd3], [%rd2], 16, [%rd4];",
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; .param .b32 retval0;
               call.uni (retval0), get, (param0); ld.param.b32 %r1, [retval0+0]; }",
            // The second block's variable is another one.
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; call.uni (retval0), get, (param0); }
             { .param .b64 param0; st.param.b64 [param0+0], %rd7; call.uni put, (param0); }",
            "setp.ne.s64 %p1, %rd2, 0; selp.b64 %rd5, %rd6, %rd7, %p1; st.global.u32 [%rd5], 1;",
        ];
        let writes = [
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
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; call.uni unknown, (param0); }",
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; call (retval0), %rd5, (param0), prototype_0; }",
            "{ .param .b64 param0; st.param.b64 [param0+0], %rd1; .param .b64 retval0;
               call.uni (retval0), next, (param0); ld.param.b64 %rd5, [retval0+0]; } st.u32 [%rd5], 1;",
        ];
        for (bodies, wanted) in [(&reads[..], false), (&writes[..], true)] {
            for body in bodies {
                let found = parameters(&FUNCTIONS.replace("BODY", body), "k").unwrap();
                let written = found.iter().map(|parameter| parameter.written);
                assert_eq!(written.collect::<Vec<_>>(), [wanted, false], "{body}");
            }
        }
    }
}
