#!/usr/bin/env python3
"""Breaks the writer (src/write.rs, src/temporary.rs) in one place at a time and runs its tests. They must notice.

    python3 tools/mutate_write.py            all mutants; exit status 1 if one survives that has no excuse (ten minutes)
    python3 tools/mutate_write.py --only X   only mutants whose description matches the regular expression X
    python3 tools/mutate_write.py --list     only says what would be tried, and checks that each text is there once
    python3 tools/mutate_write.py --log F    appends each verdict to the file F, and skips the mutants that it has

What kills a mutant, and where it is made, is as in mutate_cuda.py. As root, the tests have a disk that is full.
"""

import sys

import mutate_cuda

TESTS = ["write", "twinbuf-shuttle-pipe:histories what_is_written"]

WRITE, TEMPORARY = "write.rs", "temporary.rs"
# (file in src, what, the text, present once, its replacement)
MUTANTS = [
    # The hand-over.
    (WRITE, "what is left of a block is lost", "buffer[..self.tail.len()].copy_from_slice(&self.tail);", "let _ = buffer;"),
    (WRITE, "what is left of a block is not counted", "self.filled = self.tail.len();", "self.filled = 0;"),
    (WRITE, "a part that is not whole is handed over", "if ends { self.filled } else { self.filled / BLOCK * BLOCK }", "if ends { self.filled } else { self.filled }"),
    (WRITE, "the last part is whole blocks", "if ends { self.filled } else { self.filled / BLOCK * BLOCK }", "if ends && false { self.filled } else { self.filled / BLOCK * BLOCK }"),
    (WRITE, "a slot that is full is not handed over", "if self.slot - self.filled < next { self.hand_over(false) } else { Ok(()) }", "if self.slot - self.filled < next && false { self.hand_over(false) } else { Ok(()) }"),
    (WRITE, "rows that do not fit are given", "if self.slot - self.filled < bytes {", "if self.slot - self.filled < bytes && false {"),
    (WRITE, "a part is taken from the wrong end", "let part = (self.current.take(), len);", "let part = (self.current.take(), len.min(BLOCK));"),
    (WRITE, "a commit counts all that was given", "let _ = self.appended(bytes, given);", "let _ = self.appended(given, given);"),
    (WRITE, "a commit may come twice", "(self.given, self.filled) = (0, self.filled + bytes);", "self.filled += bytes;"),
    (WRITE, "a commit may be larger than its slot", "assert!(bytes <= given,", "assert!(bytes <= given + self.row,"),
    # The end.
    (WRITE, "a drop finishes", "finish.then(|| producer.finish());", "producer.finish();\n            let _ = finish;"),
    (WRITE, "a finish only drops", "finish.then(|| producer.finish());", "drop(producer);\n            let _ = finish;"),
    (WRITE, "a drop does not wait", "        let _ = self.end(false, END_LIMIT);\n", "        std::mem::forget(self.running.take());\n"),
    (WRITE, "a drop waits for a disk that hangs", "self.end(false, END_LIMIT)", "self.end(false, FOREVER)"),
    (WRITE, "a drop leaves a disk that works", "self.end(false, END_LIMIT)", "self.end(false, Duration::ZERO)"),
    (WRITE, "an error is not kept", ".inspect_err(|failure| self.failed = failure.clone())", ""),
    (WRITE, "a row may be cut off", "        if bytes % row != 0 {", "        if bytes % row != 0 && false {"),
    (WRITE, "a forked process waits for a thread", ".filter(|running| !running.is_foreign())", ""),
    (WRITE, "what is discarded is written first", "while at < *end && self.discarded.is_empty() {", "while at < *end {"),
    # The thread.
    (WRITE, "after an error it goes on", "            self.write(&mut part)?;\n", "            let _ = self.write(&mut part);\n"),
    (WRITE, "an empty file is not made", "if self.file.is_some() || self.files == 0 {", "if self.file.is_some() {"),
    (WRITE, "the last file has no end", "if self.file.is_some() || self.files == 0 {", "if self.files == 0 {"),
    (WRITE, "a shard has no limit", "            if len as u64 == room {\n", "            if len as u64 == room && false {\n"),
    (WRITE, "each shard has all rows", "(self.files, self.bytes) = (self.files + 1, 0);", "self.files += 1;"),
    (WRITE, "the header has the rows of an empty file", "self.to.header(self.bytes / self.to.row as u64)", "self.to.header(0)"),
    (WRITE, "rows start at the header", "self.to.dtype.map_or(0, |_| BLOCK as u64) + self.bytes", "self.bytes"),
    (WRITE, "parts are written over each other", "(self.bytes, at) = (self.bytes + len as u64, at + len);", "at += len;"),
    (WRITE, "an error has the offset of its part", "at = file.stream_position().unwrap_or(at);", "at = offset;"),
    (WRITE, "bytes that are not aligned are an error", "        if written.as_ref().is_err_and(", "        if false && written.as_ref().is_err_and("),
    (WRITE, "bytes that were written come again", "written = file.write_all(&bytes[usize::try_from(at - offset).unwrap_or(0)..]);", "written = file.write_all(bytes);"),
    (WRITE, "a file that is too large is a signal", "fits.map_err(|(most, error)| self.failed(\"write\", most.max(offset), error))?;", "let _ = fits;"),
    (WRITE, "an error of the sync is ignored", "synced.map_err(|error| self.failed(\"fsync\", self.end(), error))?;", "let _ = synced;"),
    # The options.
    (WRITE, "shards of any size", "bytes - bytes.checked_rem(whole).unwrap_or(bytes)", "bytes - bytes.checked_rem(self.row as u64).unwrap_or(bytes)"),
    (WRITE, "a folder is replaced by a file", "None => !path.is_dir() && path", "None => path"),
    (WRITE, "shards may join other files", ".symlink_metadata().is_err(),", ".symlink_metadata().is_err() || true,"),
    (WRITE, "bfloat16 is a float", "!name.contains(\"bf\") && ", ""),
    (WRITE, "slots of any number", "        check_memory(\"depth\", depth, slot, &sum)?;\n", ""),
    # The temporary file.
    (WRITE, "two writers of a name", "Temporary::create(to, shard.is_some())?.alone(200)", "Temporary::create(to, shard.is_some())"),
    (TEMPORARY, "what was left is not removed", "Ok((Ok(()), _locked)) => drop(fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path))),", "Ok((Ok(()), _locked)) => {}"),
    (TEMPORARY, "folders that were left are not removed", "Ok((Ok(()), _locked)) => drop(fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path))),", "Ok((Ok(()), _locked)) => drop(fs::remove_file(&path)),"),
    (TEMPORARY, "a longer name is the same", "number.is_some_and(|number| !number.contains(&b'.'))", "number.is_some()"),
    (TEMPORARY, "a writer is not alone with itself", " && !self.path.ends_with(&name)", ""),
    (TEMPORARY, "a turn ends with the last copy of its lock", "        let _ = turn.map(|turn| lock(&turn, false));\n", ""),
    (WRITE, "the target moves with the working folder", "std::path::absolute(&path)", "io::Result::Ok(path.clone())"),
    (TEMPORARY, "writers look at the same time", "lock(turn, true) == Err(true)", "lock(turn, true) == Err(true) && false"),
    (WRITE, "shards may replace a link", ".symlink_metadata().is_err(),", ".metadata().is_err(),"),
    (TEMPORARY, "an older file that was removed is forgotten", ".or_else(|| self.old.clone())", ""),
    (TEMPORARY, "nothing is locked", "made.as_ref().is_some_and(|made| lock(made, true) == Err(true))\n                        || matches!", "matches!"),
    (TEMPORARY, "a drop removes no folder", "        let _ = removed.or_else(|_| fs::remove_dir_all(&self.path));\n", "        let _ = removed;\n"),
    (TEMPORARY, "an empty folder takes a descriptor", ".or_else(|_| fs::remove_dir(&self.path))", ""),
]

# What -> why no test can kill it.
EXCUSES = {
    "a part that is not whole is handed over": "only slower: such a part goes through the page cache",
    "an error of the sync is ignored": "needs a disk that fails at a sync: tests/fuse",
    "bytes that were written come again": "needs a disk that refuses a write inside of a block: tests/fuse",
}

if __name__ == "__main__":
    sys.exit(mutate_cuda.main(__doc__, "twinbuf", "src", MUTANTS, EXCUSES, lambda *_: TESTS))
