//! Memory that several loaders share.

use std::sync::{Arc, Mutex, PoisonError};

/// So many bytes of memory for the slots of one or more loaders, of training and of validation, say.
///
/// A loader takes its slots' bytes when it is built, which is refused if they are no longer there, and gives them
/// back when it is dropped. Clones are the same budget.
///
/// ```
/// use twinbuf::MemoryBudget;
///
/// let budget = MemoryBudget::new(64 << 20);
/// // Loader::builder(train, plan).memory_limit(&budget); Loader::builder(valid, plan).memory_limit(&budget)
/// assert_eq!((budget.limit(), budget.used()), (64 << 20, 0));
/// ```
#[derive(Clone, Debug)]
pub struct MemoryBudget {
    limit: u64,
    used: Arc<Mutex<u64>>,
}

impl MemoryBudget {
    /// A budget of `bytes` bytes.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self { limit: bytes, used: Arc::default() }
    }

    /// Bytes in all.
    #[must_use]
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes that loaders have taken.
    #[must_use]
    pub fn used(&self) -> u64 {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes so many bytes until the result is dropped, or says how many others have.
    pub(crate) fn take(&self, bytes: u64) -> Result<Taken, u64> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > self.limit - *used {
            return Err(*used);
        }
        *used += bytes;
        Ok(Taken { bytes, used: self.used.clone() })
    }
}

/// A budget of so many bytes for one loader alone.
impl From<u64> for MemoryBudget {
    fn from(bytes: u64) -> Self {
        Self::new(bytes)
    }
}

/// The same budget.
impl From<&MemoryBudget> for MemoryBudget {
    fn from(budget: &MemoryBudget) -> Self {
        budget.clone()
    }
}

/// Bytes of a budget, given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Taken {
    bytes: u64,
    used: Arc<Mutex<u64>>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_is_given_back() {
        let budget = MemoryBudget::new(10);
        let first = budget.take(6).unwrap();
        assert_eq!(budget.take(5).unwrap_err(), 6);
        let second = MemoryBudget::from(&budget).take(4).unwrap();
        assert_eq!(budget.used(), 10);
        drop(first);
        assert_eq!(budget.used(), 4);
        drop(second);
        assert_eq!(budget.take(u64::MAX).unwrap_err(), 0);
    }
}
