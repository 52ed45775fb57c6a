//! Lists of data files from folders and patterns, in natural order.

use std::fs::Metadata;
use std::io::{self, ErrorKind};
use std::path::{Component, Path, PathBuf};

use crate::Error;

/// The characters of a pattern.
const WILD: [char; 3] = ['*', '?', '['];

/// Expands paths, folders and patterns to a list of files. Each source is one of these:
///
/// - a path of a file. It is returned unchanged, whether or not the file exists.
/// - a folder. It expands to the files and broken links in the folder, without names that start with a dot.
/// - a pattern with `*`, `?`, `[...]`, or `**` for folders at any depth, also those that links lead
///   to, but not through a link back to a folder that the path came through. It matches files and
///   broken links; a dot at the start of a name needs a dot in the pattern. A path that exists is
///   not a pattern.
///
/// The files of one source are sorted in natural order: `shard-10` comes after `shard-9`. The sources stay in the given
/// order. Opened in this order, the files are the data set: print the result once to check it.
///
/// # Errors
///
/// - [`Error::NoFiles`]: a folder has no such files, a pattern matches none, or a pattern is invalid or not UTF-8.
/// - [`Error::NotFound`], [`Error::PermissionDenied`], [`Error::Open`]: a folder could not be read, or the system did not
///   tell what is at a path that a pattern leads to.
///
/// ```
/// let folder = tempfile::tempdir()?;
/// for name in ["shard-10.npy", "shard-9.npy", "notes.txt"] {
///     std::fs::write(folder.path().join(name), [])?;
/// }
/// let paths = twinbuf_mmap::files([folder.path().join("*.npy")])?;
/// assert_eq!(paths, ["shard-9.npy", "shard-10.npy"].map(|name| folder.path().join(name)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn files(sources: impl IntoIterator<Item: AsRef<Path>>) -> Result<Vec<PathBuf>, Error> {
    let mut all = Vec::new();
    for source in sources {
        let source = source.as_ref();
        let mut found = if source.is_dir() {
            children(source, |name| !name.starts_with('.'))?
        } else if !source.exists() && source.to_string_lossy().contains(WILD) {
            matches(source)?
        } else {
            all.push(source.to_owned());
            continue;
        };
        // Keep a path that cannot be queried, such as a broken link: its open fails later, so no shard is left out silently.
        found.retain(|path| std::fs::metadata(path).map_or(true, |found| found.is_file()));
        if found.is_empty() {
            return Err(Error::NoFiles { path: source.to_owned() });
        }
        found.sort_by_cached_key(|path| (natural(path), path.clone()));
        all.append(&mut found);
    }
    Ok(all)
}

/// Returns what is in a folder and has a name that is wanted; in the working directory, if the path is empty. Bytes of a
/// name that are not UTF-8 are the character U+FFFD in what `wanted` sees.
fn children(folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>, Error> {
    let read = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let failed = |source| Error::opening(read, source);
    let names = std::fs::read_dir(read).map_err(failed)?.map(|entry| Ok(entry.map_err(failed)?.file_name()));
    let wanted = names.filter(|name| name.as_ref().map_or(true, |name| wanted(&name.to_string_lossy())));
    wanted.map(|name| Ok(folder.join(name?))).collect()
}

/// Returns what a pattern matches, part by part of its path.
fn matches(pattern: &Path) -> Result<Vec<PathBuf>, Error> {
    let none = || Error::NoFiles { path: pattern.to_owned() };
    let options = glob::MatchOptions { require_literal_leading_dot: true, ..glob::MatchOptions::new() };
    let text = pattern.to_str().filter(|text| !text.ends_with(std::path::is_separator)).ok_or_else(none)?;
    let mut found = vec![PathBuf::new()];
    for part in Path::new(text).components() {
        let name = part.as_os_str().to_str().ok_or_else(none)?;
        if !matches!(part, Component::Normal(_)) || !name.contains(WILD) {
            found.iter_mut().for_each(|path| path.push(name));
            continue;
        }
        let matcher = glob::Pattern::new(name).map_err(|_| none())?;
        found = keep(found, is_folder)?;
        let mut next = Vec::new();
        while let Some(path) = found.pop() {
            if name == "**" {
                let whole = |path: &Path| Path::new(".").join(path).canonicalize().ok();
                let goes_back =
                    |path: &Path, link: &Path| path.ancestors().any(|above| whole(above) == whole(link));
                let below = children(&path, |name| !name.starts_with('.'))?;
                let is_new = |below: &Path| !(below.is_symlink() && goes_back(&path, below));
                found.extend(keep(below, |below| Ok(is_folder(below)? && is_new(below)))?);
                next.push(path);
            } else {
                next.extend(children(&path, |name| matcher.matches_with(name, options))?);
            }
        }
        // The folders below a folder are found once more by a second `**`.
        next.sort();
        next.dedup();
        found = next;
    }
    keep(found, |path| Ok(there(path, path.symlink_metadata())?.is_some()))
}

/// Returns the paths that are wanted.
fn keep(paths: Vec<PathBuf>, wanted: impl Fn(&Path) -> Result<bool, Error>) -> Result<Vec<PathBuf>, Error> {
    let kept = paths.into_iter().map(|path| Ok(wanted(&path)?.then_some(path)));
    kept.filter_map(Result::transpose).collect()
}

/// Whether a path leads to a folder. The empty one leads to the working directory.
fn is_folder(path: &Path) -> Result<bool, Error> {
    Ok(path.as_os_str().is_empty() || there(path, path.metadata())?.is_some_and(|found| found.is_dir()))
}

/// Returns `None` if nothing is at the path, or a link that leads nowhere. After another error, something may be there:
/// without it, files would be left out silently.
fn there(path: &Path, found: io::Result<Metadata>) -> Result<Option<Metadata>, Error> {
    #[cfg(unix)]
    let is_loop = |error: &io::Error| error.raw_os_error() == Some(libc::ELOOP);
    #[cfg(not(unix))]
    let is_loop = |_: &io::Error| false;
    let is_absent = |error: &io::Error| {
        matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) || is_loop(error)
    };
    match found {
        Err(error) if is_absent(&error) => Ok(None),
        found => found.map(Some).map_err(|source| Error::opening(path, source)),
    }
}

/// Returns a key that sorts paths in natural order. Names are compared one by one: the order of a folder's files does not
/// depend on how the folder is written. In a name, runs of digits are compared as numbers, all other text as it is.
fn natural(path: &Path) -> Vec<u8> {
    let mut key = Vec::new();
    for name in path {
        let name = name.to_string_lossy();
        for part in name.as_bytes().chunk_by(|a, b| a.is_ascii_digit() == b.is_ascii_digit()) {
            if part[0].is_ascii_digit() {
                // Without leading zeros, the number with more digits is the larger one. Beside text it counts as `0`.
                let zeros = part.iter().take_while(|&&digit| digit == b'0').count();
                key.push(b'0');
                key.extend((part.len() - zeros).to_be_bytes());
                key.extend(&part[zeros..]);
            } else {
                // No name has a 0, so a text comes after each text that it starts with.
                key.extend(part);
                key.push(0);
            }
        }
        key.push(0);
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_count_as_numbers() {
        let few = ["", "a", "a-1", "a-01b", "a-2", "a-10", "a-10-2", "a-10-11"];
        let sorted = [&few[..], &["a-18446744073709551616", "ab", "b1", "b1.npy"]].concat();
        for (i, a) in sorted.iter().enumerate() {
            for (j, b) in sorted.iter().enumerate() {
                let [a, b] = [a, b].map(|name| natural(Path::new(name)));
                assert_eq!(a.cmp(&b), i.cmp(&j), "{a:?} {b:?}");
            }
        }
        assert_eq!(natural(Path::new("x07")), natural(Path::new("x7")));
    }

    #[test]
    fn folders_patterns_and_files() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        std::fs::create_dir_all(at("a/below")).unwrap();
        for name in ["a/x10.bin", "a/x9.bin", "a/.hidden", "a/below/x1.bin", "a/notes", "[x].bin"] {
            std::fs::write(at(name), []).unwrap();
        }
        assert_eq!(files([at("a")]).unwrap(), [at("a/notes"), at("a/x9.bin"), at("a/x10.bin")]);
        let binaries_and_notes = ["a/x9.bin", "a/x10.bin", "a/notes"].map(at);
        assert_eq!(files([at("a/*.bin"), at("a/notes")]).unwrap(), binaries_and_notes);
        assert_eq!(files([at("**/x1*.bin")]).unwrap(), [at("a/below/x1.bin"), at("a/x10.bin")]);
        // A file whose name looks like a pattern, and a file that is missing, are returned as they were given.
        assert_eq!(files([at("[x].bin"), at("missing")]).unwrap(), [at("[x].bin"), at("missing")]);
        std::fs::create_dir(at("empty")).unwrap();
        for none in [at("empty"), at("a/*.npy"), at("a/[")] {
            let error = files([&none]).unwrap_err();
            assert!(matches!(&error, Error::NoFiles { path } if *path == none), "{error}");
        }
        assert_eq!(files([] as [&Path; 0]).unwrap(), [] as [PathBuf; 0]);
    }

    /// The working directory of a program is not changed in a test: paths that it would be given are compared.
    #[test]
    fn the_order_does_not_depend_on_how_a_folder_is_written() {
        let names = ["#2.npy", "(1).npy", "-a.npy", "0.npy", "9.npy", "10.npy"];
        for folder in ["", "./", "e/", "/e/", "/e7/", "../e.9/"] {
            let mut paths = names.map(|name| PathBuf::from(format!("{folder}{name}")));
            paths.reverse();
            paths.sort_by_key(|path| natural(path));
            assert_eq!(paths, names.map(|name| Path::new(&format!("{folder}{name}")).to_owned()));
        }
        let nested = ["a", "a/b", "a/b/c", "a/c", "a-1/b", "a-1/b2", "a-1/b10"];
        let mut paths = nested.map(Path::new);
        paths.reverse();
        paths.sort_by_key(|path| natural(path));
        assert_eq!(paths, nested.map(Path::new));
    }

    /// Such a name is matched too, as a folder has it: no shard is left out silently.
    #[cfg(target_os = "linux")]
    #[test]
    fn names_that_are_not_utf8() {
        use std::os::unix::ffi::OsStrExt;
        let root = tempfile::tempdir().unwrap();
        let at = |name: &[u8]| root.path().join(std::ffi::OsStr::from_bytes(name));
        let [good, bad, below] = [&b"nu/a.npy"[..], b"nu/a\xff.npy", b"nu/b\xff/x.npy"].map(at);
        std::fs::create_dir_all(below.parent().unwrap()).unwrap();
        for path in [&good, &bad, &below] {
            std::fs::write(path, []).unwrap();
        }
        for (pattern, wanted) in [
            (&b"nu/a*.npy"[..], &[&good, &bad][..]),
            (b"nu/a.np?", &[&good]),
            (b"**/x.npy", &[&below]),
            (b"**/**/*/x.npy", &[&below]),
            (b"nu/*/x.npy", &[&below]),
        ] {
            let found = files([at(pattern)]).unwrap();
            assert_eq!(found.iter().collect::<Vec<_>>(), wanted, "{}", pattern.escape_ascii());
        }
    }

    /// The folder has a link to a file that is gone, as in a download cache that was partly deleted.
    #[cfg(unix)]
    #[test]
    fn a_link_to_a_file_that_is_gone_is_not_left_out() {
        let root = tempfile::tempdir().unwrap();
        let [kept, gone] = ["0.bin", "1.bin"].map(|name| root.path().join(name));
        std::fs::write(&kept, [1; 8]).unwrap();
        std::os::unix::fs::symlink(root.path().join("deleted"), &gone).unwrap();
        std::os::unix::fs::symlink(root.path(), root.path().join("folder")).unwrap();
        for source in [root.path().to_owned(), root.path().join("*")] {
            let found = files([source]).unwrap();
            assert_eq!(found, [kept.clone(), gone.clone()]);
            let error = crate::Records::open(&found, 8).unwrap_err();
            assert!(matches!(&error, Error::NotFound { path } if *path == gone), "{error:?}");
        }
    }

    /// The name is too long, so the system refuses to look it up. A mode would not do: root may look into all folders.
    #[test]
    fn what_the_system_does_not_tell_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let long = "x".repeat(300);
        std::fs::create_dir(at("a")).unwrap();
        std::fs::write(at("a/x"), []).unwrap();
        assert_eq!(files([at("*/x")]).unwrap(), [at("a/x")]);
        for pattern in [format!("*/{long}"), format!("*/{long}/*"), format!("{long}/**/x")] {
            let error = files([at(&pattern)]).unwrap_err();
            assert!(
                matches!(&error, Error::Open { path, .. } if path.ends_with(&long)),
                "{pattern}: {error:?}"
            );
        }
        #[cfg(unix)]
        for (to, is_left_out) in [("loop", true), (long.as_str(), false)] {
            std::os::unix::fs::symlink(to, at("loop")).unwrap();
            for pattern in ["*/x", "**/x"] {
                assert_eq!(files([at(pattern)]).is_ok(), is_left_out, "{pattern} {to}");
            }
            std::fs::remove_file(at("loop")).unwrap();
        }
    }

    /// Links between folders, also back to those above: each file once by each way, and no way twice through a folder.
    #[cfg(unix)]
    #[test]
    fn a_link_back_leads_nowhere() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        for (name, link, to) in [("a", "a/up", ".."), ("b", "b/a", "../a"), ("c", "c/b", "../b")] {
            std::fs::create_dir(at(name)).unwrap();
            std::fs::write(at(name).join("x"), []).unwrap();
            std::os::unix::fs::symlink(to, at(link)).unwrap();
        }
        assert_eq!(files([at("**/x")]).unwrap(), ["a/x", "b/a/x", "b/x", "c/b/a/x", "c/b/x", "c/x"].map(at));
        assert_eq!(files([at("a/**/x")]).unwrap(), [at("a/x")]);
    }
}
