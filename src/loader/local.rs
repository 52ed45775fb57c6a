//! The device of a rank.

use std::ffi::OsString;
use std::sync::Arc;

use twinbuf_cuda::cudarc::driver::CudaContext;

use crate::error::Error;

/// Where launchers put the number of a process on its machine: torchrun, Open MPI, MPICH, Slurm.
const NAMES: [&str; 4] = ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"];

/// Makes a context of the device whose number is this process's rank on its machine: `LOCAL_RANK` (torchrun),
/// `OMPI_COMM_WORLD_LOCAL_RANK`, `MPI_LOCALRANKID` or `SLURM_LOCALID`. Without any of them it is device 0.
///
/// A launcher may show each process one device alone. Then that is its device, whatever the rank.
///
/// # Errors
///
/// [`Error::Switch`] if the variable is not a number, or there is no such device; [`Error::Device`] if there is no driver
/// or no device.
pub fn context_from_env() -> Result<Arc<CudaContext>, Error> {
    let Some((name, found)) = NAMES.into_iter().find_map(|name| Some((name, std::env::var_os(name)?))) else {
        return context(0);
    };
    let wanted = "the number of a device".to_string();
    let refused = Error::Switch { name: name.to_string(), wanted, found: found.clone() };
    let rank = local_rank(&found).ok_or(refused)?;
    match twinbuf_cuda::context(rank) {
        // The driver is present, but not that device.
        Err(twinbuf_cuda::Error::Option { wanted, .. }) => match CudaContext::device_count() {
            Ok(1) => context(0),
            _ => Err(Error::Switch { name: name.to_string(), wanted, found }),
        },
        made => made.map_err(|error| Error::Device(error.into())),
    }
}

fn context(ordinal: usize) -> Result<Arc<CudaContext>, Error> {
    twinbuf_cuda::context(ordinal).map_err(|error| Error::Device(error.into()))
}

fn local_rank(value: &OsString) -> Option<usize> {
    value.to_str()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_a_whole_number() {
        let rank = |value: &str| local_rank(&value.into());
        assert_eq!((rank("0"), rank(" 7 ")), (Some(0), Some(7)));
        assert_eq!((rank("-1"), rank(""), rank("gpu0"), rank("1.0")), (None, None, None, None));
    }
}
