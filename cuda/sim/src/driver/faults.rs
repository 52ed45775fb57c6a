//! The handlers of SIGSEGV and SIGTRAP: an access to a closed page of memory that the program sees stops here (`guard`).
//! To open a page for one instruction, they set the processor's trap flag.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use super::guard::{PAGE, Verdict, stepped};
use super::machine::{is_forked, lock, stopped};
use super::operand::width;
use crate::sys::{self, SigAction, SigInfo};

/// The handlers that were there before, of SIGSEGV and of SIGTRAP.
static BEFORE: [OnceLock<SigAction>; 2] = [const { OnceLock::new() }; 2];

type Handler = extern "C" fn(c_int, *mut SigInfo, *mut c_void);

/// Installs the handlers, once.
pub(super) fn handle() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(install);
}

fn install() {
    let handlers: [(c_int, Handler); 2] = [(sys::SIGSEGV, on_fault), (sys::SIGTRAP, on_step)];
    for ((signal, handler), before) in handlers.into_iter().zip(&BEFORE) {
        // Run the handlers on the thread's own stack: an alternate stack is too small to take a call stack.
        let action = SigAction { handler: handler as usize, flags: sys::SA_SIGINFO, ..SigAction::default() };
        let mut old = SigAction::default();
        // SAFETY: both pointers are valid. A handler acts only on faults of the program's own instructions: `stopped`
        // ignores faults inside this driver. So the thread that faults holds neither this driver's lock nor an allocator's.
        unsafe { sys::sigaction(signal, &raw const action, &raw mut old) };
        let _ = before.set(old);
    }
}

/// Passes a signal that is not the guard's to the handler that was installed before.
fn pass_on(signal: c_int, info: *mut SigInfo, context: *mut c_void, before: &OnceLock<SigAction>) {
    let Some(before) = before.get() else { return };
    if sys::NO_HANDLERS.contains(&before.handler) {
        // There was no handler. After a fault, the default action ends the process when the instruction runs again. A
        // breakpoint's instruction does not run again: its signal is sent once more.
        // SAFETY: the action is the one that the process had.
        unsafe { sys::sigaction(signal, before, null_mut()) };
        if signal == sys::SIGTRAP {
            // SAFETY: takes a plain value.
            unsafe { sys::raise(signal) };
        }
        return;
    }
    // SAFETY: sigaction returned this handler for this signal. A handler without SA_SIGINFO takes only the signal
    // number, and ignores the other arguments.
    let handler = unsafe { std::mem::transmute::<usize, Handler>(before.handler) };
    handler(signal, info, context);
}

/// The instruction that a fault or a trap stopped, with the thread's registers.
pub(super) struct Instruction(*mut c_void);

#[cfg(target_arch = "x86_64")]
#[allow(
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    clippy::cast_possible_truncation,
    reason = "registers"
)]
impl Instruction {
    fn register(&self, register: usize) -> u64 {
        // SAFETY: the kernel gives the handler the context of the stopped thread.
        unsafe { (*self.0.cast::<sys::Context>()).registers[register] as u64 }
    }

    fn set(&mut self, register: usize, value: u64) {
        // SAFETY: as in `register`.
        unsafe { (*self.0.cast::<sys::Context>()).registers[register] = value as i64 };
    }

    /// The processor's trap flag, in the saved flags.
    fn trap_after_this(&mut self, on: bool) {
        const TRAP: u64 = 0x100;
        let flags = self.register(sys::FLAGS);
        self.set(sys::FLAGS, if on { flags | TRAP } else { flags & !TRAP });
    }

    /// Whether the access that faulted was a write: bit 1 of the page fault's error code.
    fn was_write(&self) -> bool {
        self.register(sys::ERROR) & 2 != 0
    }

    fn code(&self) -> impl Iterator<Item = u8> {
        let at = self.register(sys::INSTRUCTION) as *const u8;
        // SAFETY: the processor has just read this instruction, and its readers here read no byte behind it.
        (0..).map(move |i| unsafe { at.wrapping_add(i).read() })
    }

    /// Of `rep movs` and `rep stos` that go up: whether it copies, the bytes of an element, and how many elements from
    /// this address on are on its page. `None` for other instructions.
    fn repeated(&self, address: u64, write: bool) -> Option<(bool, u64, u64)> {
        const DOWN: u64 = 0x400;
        let mut code = self.code();
        let (copies, bytes) = match (code.next()?, code.next()?) {
            (0xF3, opcode @ (0xA4 | 0xAA)) => (opcode == 0xA4, 1),
            (0xF3, opcode @ (0xA5 | 0xAB)) => (opcode == 0xA5, 4),
            (0xF3, 0x48) => match code.next()? {
                opcode @ (0xA5 | 0xAB) => (opcode == 0xA5, 8),
                _ => return None,
            },
            _ => return None,
        };
        let here = self.register(if write { sys::RDI } else { sys::RSI });
        let count = self.register(sys::RCX).min((PAGE - address % PAGE) / bytes);
        (here == address && self.register(sys::FLAGS) & DOWN == 0 && count > 0)
            .then_some((copies, bytes, count))
    }

    /// The bytes of the access that it makes at this address.
    pub(super) fn bytes(&self, address: u64, write: bool) -> u64 {
        match self.repeated(address, write) {
            Some((_, bytes, count)) => bytes * count,
            // A fault at a page's first byte may be of an access that begins on the page before it.
            None if address % PAGE == 0 => 1,
            None => width(self.code(), write),
        }
    }

    /// Makes the accesses of an instruction that repeats, up to the page's end, in the device's mapping of the page: a trap
    /// would come after each element. Returns whether it made some.
    pub(super) fn repeat(&mut self, device: u64, address: u64, write: bool) -> bool {
        let Some((copies, bytes, count)) = self.repeated(address, write) else { return false };
        let done = if copies {
            let part = |at: u64| sys::Part { at: at as *mut c_void, bytes: (bytes * count) as usize };
            let (from, to) =
                if write { (self.register(sys::RSI), device) } else { (device, self.register(sys::RDI)) };
            // The kernel copies: it stops where the other side cannot be accessed.
            // SAFETY: the program's instruction makes this copy, between these addresses or the device's in place of one.
            let copied =
                unsafe { sys::process_vm_readv(std::process::id() as i32, &part(to), 1, &part(from), 1, 0) };
            u64::try_from(copied).unwrap_or(0) / bytes
        } else {
            let value = self.register(sys::RAX).to_le_bytes();
            for i in 0..count * bytes {
                // SAFETY: on the page, in the device's mapping of it. The program's instruction makes this store.
                unsafe {
                    (device as *mut u8).wrapping_add(i as usize).write_volatile(value[(i % bytes) as usize]);
                };
            }
            count
        };
        self.set(sys::RCX, self.register(sys::RCX) - done);
        self.set(sys::RDI, self.register(sys::RDI) + done * bytes);
        if copies {
            self.set(sys::RSI, self.register(sys::RSI) + done * bytes);
        }
        done > 0
    }
}

/// No page is ever closed.
#[cfg(not(target_arch = "x86_64"))]
impl Instruction {
    fn trap_after_this(&mut self, _on: bool) {}

    fn was_write(&self) -> bool {
        false
    }

    pub(super) fn bytes(&self, _address: u64, write: bool) -> u64 {
        width([], write)
    }

    pub(super) fn repeat(&mut self, _device: u64, _address: u64, _write: bool) -> bool {
        false
    }
}

/// Opens a range of closed pages without the driver's lock. `false` if no memory of the driver is there.
fn open_in_child(address: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let range = |line: &str| {
        let (from, to) = line.split_whitespace().next()?.split_once('-')?;
        Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?))
    };
    let ours = maps.lines().filter(|line| line.contains("/memfd:cuda-sim")).filter_map(range);
    ours.filter(|(from, to)| (*from..*to).contains(&address)).any(|(from, to)| {
        let prot = sys::PROT_READ | sys::PROT_WRITE;
        let Ok(bytes) = usize::try_from(to - from) else { return false };
        // SAFETY: pages of page-locked or managed memory, which are open where there is no guard.
        unsafe { sys::mprotect(from as *mut c_void, bytes, prot) == 0 }
    })
}

extern "C" fn on_fault(signal: c_int, info: *mut SigInfo, context: *mut c_void) {
    // SAFETY: the kernel gives the handler a valid one.
    let address = unsafe { (*info).address } as u64;
    // The lock may be held for good.
    if is_forked() {
        if !open_in_child(address) {
            pass_on(signal, info, context, &BEFORE[0]);
        }
        return;
    }
    let mut instruction = Instruction(context);
    let write = instruction.was_write();
    match stopped(address, write, &mut instruction) {
        Verdict::Foreign => pass_on(signal, info, context, &BEFORE[0]),
        Verdict::Resume => {}
        Verdict::Step => instruction.trap_after_this(true),
    }
}

extern "C" fn on_step(signal: c_int, info: *mut SigInfo, context: *mut c_void) {
    let pages = stepped();
    if pages.is_empty() {
        return pass_on(signal, info, context, &BEFORE[1]);
    }
    Instruction(context).trap_after_this(false);
    let core = lock();
    for (program, page) in pages {
        if let Some(mapping) = core.mapping(program) {
            mapping.close_again(page);
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
#[allow(clippy::cast_possible_wrap, clippy::cast_sign_loss, reason = "registers")]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_that_repeats_is_carried_out_to_the_pages_end() {
        const AT: u64 = 2 * PAGE - 64;
        // The code, whether it copies, the bytes of an element.
        let table: [(&[u8], bool, u64); 6] = [
            (&[0xF3, 0xA4], true, 1),
            (&[0xF3, 0xA5], true, 4),
            (&[0xF3, 0x48, 0xA5], true, 8),
            (&[0xF3, 0xAA], false, 1),
            (&[0xF3, 0xAB], false, 4),
            (&[0xF3, 0x48, 0xAB], false, 8),
        ];
        for ((code, copies, bytes), write) in table.into_iter().flat_map(|row| [(row, true), (row, false)]) {
            if !copies && !write {
                continue;
            }
            // The page's last 64 bytes as the device sees them, and the other side of a copy.
            let (mut device, mut other) = ([1_u8; 80], [2_u8; 80]);
            let far = other.as_mut_ptr() as u64;
            let [to, from] = if write { [AT, far] } else { [far, AT] };
            let mut context = sys::Context::default();
            let value = u64::from_le_bytes([3; 8]);
            for (register, value) in [
                (sys::INSTRUCTION, code.as_ptr() as u64),
                (sys::RDI, to),
                (sys::RSI, from),
                (sys::RCX, 100),
                (sys::RAX, value),
            ] {
                context.registers[register] = value as i64;
            }
            // Downwards, without a count, of another page: element by element.
            for (register, value) in
                [(sys::FLAGS, 0x400), (sys::RCX, 0), (if write { sys::RDI } else { sys::RSI }, 8)]
            {
                let mut wrong = context.clone();
                wrong.registers[register] = value;
                assert_eq!(Instruction((&raw mut wrong).cast()).repeated(AT, write), None);
            }
            let mut instruction = Instruction((&raw mut context).cast());
            assert_eq!(instruction.bytes(AT, write), 64);
            assert!(instruction.repeat(device.as_mut_ptr() as u64, AT, write), "{code:x?}");
            let (in_device, in_other) = match (copies, write) {
                (true, true) => (2, 2),
                (true, false) => (1, 1),
                _ => (3, 2),
            };
            assert_eq!(
                (device[..64].to_vec(), &device[64..]),
                (vec![in_device; 64], &[1; 16][..]),
                "{code:x?}"
            );
            assert_eq!((other[..64].to_vec(), &other[64..]), (vec![in_other; 64], &[2; 16][..]), "{code:x?}");
            let moved = [sys::RDI, sys::RSI, sys::RCX].map(|register| context.registers[register] as u64);
            let read = if copies { from + 64 } else { from };
            assert_eq!(moved, [to + 64, read, 100 - 64 / bytes], "{code:x?}");
        }
    }
}
