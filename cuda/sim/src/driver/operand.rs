//! The instruction of x86-64 that a page fault stopped: how many bytes it accesses, as the fault tells only where the access
//! begins, and what it repeats.
//! Encodings: Intel's "Software Developer's Manual", volume 2, chapter 2 and the maps of opcodes.

use std::ffi::c_void;

use super::guard::PAGE;
use crate::sys;

/// The instruction that a fault or a trap stopped, with the thread's registers.
pub(super) struct Instruction(*mut c_void);

impl Instruction {
    /// By the context that the kernel gives the handler.
    pub(super) fn stopped(context: *mut c_void) -> Self {
        Self(context)
    }
}

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
    pub(super) fn trap_after_this(&mut self, on: bool) {
        const TRAP: u64 = 0x100;
        let flags = self.register(sys::FLAGS);
        self.set(sys::FLAGS, if on { flags | TRAP } else { flags & !TRAP });
    }

    /// Whether the access that faulted was a write: bit 1 of the page fault's error code.
    pub(super) fn was_write(&self) -> bool {
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
    pub(super) fn trap_after_this(&mut self, _on: bool) {}

    pub(super) fn was_write(&self) -> bool {
        false
    }

    pub(super) fn bytes(&self, _address: u64, write: bool) -> u64 {
        width([], write)
    }

    pub(super) fn repeat(&mut self, _device: u64, _address: u64, _write: bool) -> bool {
        false
    }
}

/// The bytes of an access, by its instruction's code. 1 if the instruction is none of those here. Also 1 for a read of a
/// vector: the C library's functions for strings read whole vectors, of which they use a part.
fn width(code: impl IntoIterator<Item = u8>, write: bool) -> u64 {
    bytes(&mut code.into_iter()).filter(|bytes| write || *bytes <= 8).unwrap_or(1)
}

fn bytes(code: &mut dyn Iterator<Item = u8>) -> Option<u64> {
    let (mut half, mut repeat, mut wide) = (false, 0, false);
    let mut opcode = code.next()?;
    loop {
        match opcode {
            0x66 => half = true,
            0xF2 | 0xF3 => repeat = opcode,
            // Segments, the size of addresses, LOCK.
            0x26 | 0x2E | 0x36 | 0x3E | 0x64 | 0x65 | 0x67 | 0xF0 => {}
            _ => break,
        }
        opcode = code.next()?;
    }
    if opcode & 0xF0 == 0x40 {
        wide = opcode & 8 != 0;
        opcode = code.next()?;
    }
    let scalar = if wide { 8 } else { 4 >> u32::from(half) };
    match opcode {
        0x0F => {
            let prefix = if repeat == 0 { u8::from(half) } else { repeat };
            let opcode = code.next()?;
            match opcode {
                0x90..=0x9F | 0xB0 | 0xB6 | 0xBE | 0xC0 => Some(1),
                0xB7 | 0xBF => Some(2),
                0x40..=0x4F | 0xA3..=0xA5 | 0xAB..=0xAD | 0xAF | 0xB1 | 0xB3 => Some(scalar),
                0xB8 | 0xBA..=0xBD | 0xC1 | 0xC3 => Some(scalar),
                // CRC32 of a byte, MOVBE and CRC32, ADCX and AADD with those of their opcodes.
                0x38 => match code.next()? {
                    0xF0 if repeat == 0xF2 => Some(1),
                    0xF0 | 0xF1 => Some(scalar),
                    0xF6 | 0xFC => Some(if wide { 8 } else { 4 }),
                    _ => None,
                },
                // CMPXCHG8B, CMPXCHG16B.
                0xC7 if code.next()? >> 3 & 7 == 1 => Some(if wide { 16 } else { 8 }),
                _ => vector(opcode, prefix, wide, 16),
            }
        }
        // VEX.
        0xC5 => {
            let last = code.next()?;
            vector(code.next()?, PREFIXES[usize::from(last & 3)], false, 16 << (last >> 2 & 1))
        }
        0xC4 => {
            let (map, last) = (code.next()? & 31, code.next()?);
            let (opcode, length) = (code.next()?, 16 << (last >> 2 & 1));
            mapped(map, opcode, PREFIXES[usize::from(last & 3)], last >> 7 != 0, length)
        }
        // EVEX. With a mask, some of the bytes.
        0x62 => {
            let (map, middle, last) = (code.next()? & 7, code.next()?, code.next()?);
            let (opcode, length) = (code.next()?, 16 << (last >> 5 & 3));
            let masked = last & 7 != 0;
            mapped(map, opcode, PREFIXES[usize::from(middle & 3)], middle >> 7 != 0, length)
                .filter(|_| !masked)
        }
        0x63 => Some(4),
        // XLAT, and the floating-point unit of the 8087.
        0xD7..=0xDF => None,
        // In all pairs of operations, the even one is of bytes.
        _ => Some(if opcode & 1 == 0 { 1 } else { scalar }),
    }
}

/// The prefixes that two bits of VEX and EVEX encode. 1 is 0x66.
const PREFIXES: [u8; 4] = [0, 1, 0xF3, 0xF2];

fn mapped(map: u8, opcode: u8, prefix: u8, wide: bool, length: u64) -> Option<u64> {
    match (map, opcode) {
        (1, _) => vector(opcode, prefix, wide, length),
        // A part of a vector: VEXTRACTF128, VEXTRACTF64X4, and their kind.
        (3, 0x19 | 0x39) => Some(16),
        (3, 0x1B | 0x3B) => Some(32),
        _ => None,
    }
}

/// Moves of SSE and AVX, and what they compute with one number.
fn vector(opcode: u8, prefix: u8, wide: bool, length: u64) -> Option<u64> {
    match (opcode, prefix) {
        (0x10 | 0x11 | 0x2C | 0x2D | 0x51..=0x5A | 0x5C..=0x5F | 0xC2, 0xF3) | (0x2E | 0x2F, 0) => Some(4),
        (0x10 | 0x11 | 0x2C | 0x2D | 0x51..=0x5F | 0xC2, 0xF2) | (0x2E | 0x2F, 1) => Some(8),
        (0x2A, 0xF2 | 0xF3) => Some(if wide { 8 } else { 4 }),
        (0x12 | 0x13 | 0x16 | 0x17, 0 | 1) | (0x7E, 0xF3) | (0xD6, 1) => Some(8),
        (0x10 | 0x11 | 0x28 | 0x29 | 0x2B, 0 | 1) => Some(length),
        (0x6E | 0x7E, 0 | 1) => Some(if wide { 8 } else { 4 }),
        // Without a prefix, of MMX.
        (0x6F | 0x7F | 0xE7, 0) => Some(8),
        (0x6F | 0x7F, _) | (0xE7, 1) => Some(length),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_an_instruction_follow_from_its_code() {
        // The code, with an address in rax or rdi; the bytes of a read and of a write.
        let table: [(&[u8], [u64; 2]); 37] = [
            (&[0x88, 0x00], [1, 1]),                               // mov [rax], al
            (&[0x66, 0x89, 0x00], [2, 2]),                         // mov [rax], ax
            (&[0x89, 0x00], [4, 4]),                               // mov [rax], eax
            (&[0x48, 0x89, 0x00], [8, 8]),                         // mov [rax], rax
            (&[0x48, 0xC7, 0x00, 0xFF, 0xFF, 0xFF, 0xFF], [8, 8]), // mov qword [rax], -1
            (&[0xF0, 0x48, 0x0F, 0xC1, 0x00], [8, 8]),             // lock xadd [rax], rax
            (&[0x48, 0x83, 0x00, 0x01], [8, 8]),                   // add qword [rax], 1
            (&[0xF3, 0xAA], [1, 1]),                               // rep stosb
            (&[0xF3, 0x48, 0xAB], [8, 8]),                         // rep stosq
            (&[0x48, 0x63, 0x00], [4, 4]),                         // movsxd rax, [rax]
            (&[0x0F, 0xB6, 0x00], [1, 1]),                         // movzx eax, byte [rax]
            (&[0x48, 0x0F, 0xC7, 0x08], [1, 16]),                  // cmpxchg16b [rax]
            (&[0xF3, 0x0F, 0x11, 0x00], [4, 4]),                   // movss [rax], xmm0
            (&[0xF2, 0x0F, 0x10, 0x00], [8, 8]),                   // movsd xmm0, [rax]
            (&[0x0F, 0x11, 0x00], [1, 16]),                        // movups [rax], xmm0
            (&[0x66, 0x0F, 0xD6, 0x00], [8, 8]),                   // movq [rax], xmm0
            (&[0x66, 0x48, 0x0F, 0x7E, 0x00], [8, 8]),             // movq [rax], xmm0
            (&[0xF3, 0x0F, 0x7F, 0x00], [1, 16]),                  // movdqu [rax], xmm0
            (&[0x66, 0x0F, 0xE7, 0x00], [1, 16]),                  // movntdq [rax], xmm0
            (&[0xC5, 0xFE, 0x7F, 0x00], [1, 32]),                  // vmovdqu [rax], ymm0
            (&[0xC5, 0xFA, 0x11, 0x00], [4, 4]),                   // vmovss [rax], xmm0
            (&[0xC4, 0xE1, 0xF9, 0x7E, 0x00], [8, 8]),             // vmovq [rax], xmm0
            (&[0xC4, 0xE3, 0x7D, 0x39, 0x00, 0x01], [1, 16]),      // vextracti128 [rax], ymm0, 1
            (&[0x62, 0xE1, 0xFE, 0x48, 0x7F, 0x00], [1, 64]),      // vmovdqu64 [rax], zmm16
            (&[0x62, 0xE1, 0xFE, 0x28, 0x7F, 0x00], [1, 32]),      // vmovdqu64 [rax], ymm16
            (&[0x62, 0xE1, 0x7F, 0x49, 0x7F, 0x00], [1, 1]),       // vmovdqu8 [rax]{k1}, zmm16
            (&[0x48, 0x0F, 0xAB, 0x08], [8, 8]),                   // bts [rax], rcx
            (&[0xF0, 0x0F, 0xBA, 0x30, 0x05], [4, 4]),             // lock btr dword [rax], 5
            (&[0xF3, 0x48, 0x0F, 0xB8, 0x00], [8, 8]),             // popcnt rax, [rax]
            (&[0x48, 0x0F, 0x38, 0xF1, 0x00], [8, 8]),             // movbe [rax], rax
            (&[0x48, 0x0F, 0x38, 0xFC, 0x08], [8, 8]),             // aadd [rax], rcx
            (&[0xF2, 0x0F, 0x58, 0x00], [8, 8]),                   // addsd xmm0, [rax]
            (&[0xF3, 0x0F, 0x5B, 0x00], [1, 1]),                   // cvttps2dq xmm0, [rax]
            (&[0xF3, 0x48, 0x0F, 0x2A, 0x00], [8, 8]),             // cvtsi2ss xmm0, qword [rax]
            (&[0xC5, 0xF8, 0x2E, 0x00], [4, 4]),                   // vucomiss xmm0, [rax]
            (&[0xDD, 0x18], [1, 1]),                               // fstp qword [rax]
            (&[], [1, 1]),
        ];
        for (code, wanted) in table {
            let found = [false, true].map(|write| width(code.iter().copied(), write));
            assert_eq!(found, wanted, "{code:x?}");
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    #[allow(clippy::cast_possible_wrap, clippy::cast_sign_loss, reason = "registers")]
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
        let writes = table.map(|row| (row, true));
        let reads = table.map(|row| (row, false)).into_iter().filter(|((_, copies, _), _)| *copies);
        for ((code, copies, bytes), write) in writes.into_iter().chain(reads) {
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
            let filled = |with, before| [[with; 64].as_slice(), &[before; 16]].concat();
            assert_eq!(
                (&device[..], &other[..]),
                (&*filled(in_device, 1), &*filled(in_other, 2)),
                "{code:x?}"
            );
            let moved = [sys::RDI, sys::RSI, sys::RCX].map(|register| context.registers[register] as u64);
            let read = if copies { from + 64 } else { from };
            assert_eq!(moved, [to + 64, read, 100 - 64 / bytes], "{code:x?}");
        }
    }
}
