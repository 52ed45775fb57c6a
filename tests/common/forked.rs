//! Processes that are forked from a test.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Limits the bytes of the files that this process writes.
pub(crate) fn limit_files(most: libc::rlim_t) {
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: the kernel reads `limit`, a live local.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
}

/// Runs `child` in a forked process and returns whether it returned true; an alarm ends a hang. The child must not allocate
/// while another thread may hold the allocator's lock; glibc's malloc takes care of that.
pub(crate) fn forked(child: impl FnOnce() -> bool) -> bool {
    // SAFETY: takes no pointer. The child leaves by `_exit` and runs nothing of the test harness.
    match unsafe { libc::fork() } {
        -1 => panic!("fork: {}", std::io::Error::last_os_error()),
        0 => {
            // SAFETY: takes no pointer.
            unsafe { libc::alarm(300) };
            // A panic would end the only thread, and with it the process: with the status of a success.
            let right = catch_unwind(AssertUnwindSafe(child)).unwrap_or(false);
            // SAFETY: takes no pointer, and does not return.
            unsafe { libc::_exit(i32::from(!right)) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: the kernel writes to `status`, a live local.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
        }
    }
}
