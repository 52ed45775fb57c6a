//! The device of a rank.

use std::ffi::OsString;
use std::sync::Arc;

use twinbuf_cuda::cudarc::driver::CudaContext;

use crate::error::Error;

/// Where launchers put the number of a process on its machine: torchrun, Open MPI, MPICH, Slurm.
const NAMES: [&str; 4] = ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"];

/// Creates a context on the device of this process's local rank. The rank is the value of the first of these
/// environment variables that is set: `LOCAL_RANK` (torchrun), `OMPI_COMM_WORLD_LOCAL_RANK` (Open MPI),
/// `MPI_LOCALRANKID` (MPICH), `SLURM_LOCALID` (Slurm). If none is set, the device is 0.
///
/// If exactly one device is visible, the device is 0 for every rank: some launchers show each process only its own
/// device.
///
/// # Errors
///
/// - [`Error::Switch`]: the variable is not a number, or no device has this number.
/// - [`Error::Device`]: there is no driver or no device.
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
