//! Kernels as PTX text: their parameters, and which buffers they write. They are not run.
//! Syntax: NVIDIA's "Parallel Thread Execution ISA".

use std::collections::{BTreeMap, BTreeSet};

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parameter {
    /// Whether it is one integer of 64 bits, which may be an address.
    pub(super) address: bool,
    /// Whether the entry's own code stores at an address that it computes from this one in registers.
    pub(super) written: bool,
}

/// The parameters of an entry; `None` if the text has none of this name.
pub(super) fn parameters(text: &str, name: &str) -> Option<Vec<Parameter>> {
    let after = text
        .split(".entry")
        .skip(1)
        .find_map(|entry| entry.trim_start().strip_prefix(name)?.trim_start().strip_prefix('('))?;
    let (list, body) = after.split_once(')')?;
    let body = body.split(".entry").next()?;
    let declared: Vec<&str> = list.split(',').map(str::trim).filter(|one| !one.is_empty()).collect();
    let name_of = |declared: &str| declared.split_whitespace().last().map(str::to_owned);
    let names: Vec<String> = declared.iter().filter_map(|one| name_of(one)).collect();
    let written = written(body, &names);
    let one = |(declared, name): (&&str, &String)| {
        let wide =
            [".u64", ".s64", ".b64"].iter().any(|kind| declared.split_whitespace().any(|word| word == *kind));
        Parameter { address: wide && !name.contains('['), written: written.contains(name) }
    };
    Some(declared.iter().zip(&names).map(one).collect())
}

/// The parameters that the addresses of stores come from, through registers.
fn written(body: &str, names: &[String]) -> BTreeSet<String> {
    let mut from = BTreeMap::<String, BTreeSet<String>>::new();
    let mut written = BTreeSet::new();
    // In a loop, a register may be used above its definition: the second pass finds those uses.
    for _ in 0..2 {
        for line in body.split([';', '{', '}']) {
            let mut words = line
                .split(|c: char| c.is_whitespace() || ",[]()+".contains(c))
                .filter(|word| !word.is_empty());
            let Some(operation) = words.by_ref().find(|word| !word.starts_with('@') && !word.ends_with(':'))
            else {
                continue;
            };
            let words: Vec<&str> = words.collect();
            let sources = |words: &[&str]| {
                let of = |word: &&str| {
                    let own =
                        names.iter().find(|name| name == word).map(|name| BTreeSet::from([name.clone()]));
                    own.or_else(|| from.get(*word).cloned()).unwrap_or_default()
                };
                words.iter().flat_map(of).collect::<BTreeSet<_>>()
            };
            let stores = |kind: &str| operation.starts_with(kind) && !operation.starts_with("st.param");
            if stores("st.") || stores("red.") {
                written.extend(sources(words.get(..1).unwrap_or_default()));
            } else if stores("atom.") {
                written.extend(sources(words.get(1..2).unwrap_or_default()));
            } else if !operation.starts_with("ld.") || operation.starts_with("ld.param") {
                let (Some(to), Some(rest)) = (words.first(), words.get(1..)) else { continue };
                let new = sources(rest);
                from.entry((*to).to_owned()).or_default().extend(new);
            }
        }
    }
    written
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
}
