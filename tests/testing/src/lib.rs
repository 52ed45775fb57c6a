//! What the tests of several crates share.

/// Chooses the extent of a test: its number of seeds, cases or rounds, or the bound of a model. `few` finds every listed
/// mutant (`tools/mutate*.py`); `TWINBUF_TEST_WHOLE=1`, as in `.ci/run`, takes `all`.
#[must_use]
pub fn extent<T>(few: T, all: T) -> T {
    if std::env::var_os("TWINBUF_TEST_WHOLE").is_some_and(|value| value == "1") { all } else { few }
}
