//! Which rank of how many this process is, as the program that launched it says in the environment.

use std::fmt;

use crate::plan::{Plan, PlanBuilder};

/// A pair of variables that a launcher sets for every process it starts.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    world: &'static str,
}

/// Launchers that start the processes themselves. Sources: torchrun's documentation ("Environment Variables"),
/// Open MPI's manual of `mpirun` ("Environment Variables"), the PMI-1 wire protocol of Hydra (MPICH, Intel MPI).
const LAUNCHERS: [Launcher; 3] = [
    Launcher { name: "torchrun", rank: "RANK", world: "WORLD_SIZE" },
    Launcher { name: "Open MPI", rank: "OMPI_COMM_WORLD_RANK", world: "OMPI_COMM_WORLD_SIZE" },
    Launcher { name: "PMI", rank: "PMI_RANK", world: "PMI_SIZE" },
];

/// Slurm starts processes itself (`srun`), or the launchers above, once a node: then its own numbers are theirs.
///
/// Only the processes of a step have its number of tasks: it stands in the manual of `srun` ("Output environment
/// variables") and not in that of `sbatch`, and Slurm's `src/common/env.c` sets it in `env_array_for_step`, not in
/// `env_array_for_batch_job`. A batch script has a `SLURM_PROCID` too, 0, and `SLURM_NTASKS` if its job was given any.
const SLURM: Launcher = Launcher { name: "Slurm", rank: "SLURM_PROCID", world: "SLURM_STEP_NUM_TASKS" };

/// Set by torchrun for its workers: it is then the launcher closest to the process, whoever started it.
const TORCHRUN: &str = "TORCHELASTIC_RUN_ID";

impl Plan {
    /// As [`builder`](Plan::builder), with the rank and the world size from the environment: rank 0 of 1 if no
    /// launcher set any.
    ///
    /// | launcher | rank | world size |
    /// | --- | --- | --- |
    /// | torchrun | `RANK` | `WORLD_SIZE` |
    /// | Open MPI | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` |
    /// | PMI (Hydra: MPICH, Intel MPI) | `PMI_RANK` | `PMI_SIZE` |
    /// | Slurm (`srun`) | `SLURM_PROCID` | `SLURM_STEP_NUM_TASKS` |
    ///
    /// Slurm's are read only if there are no others, because under it the other launchers are started once a
    /// node. torchrun's go before all others when it says that it is there (`TORCHELASTIC_RUN_ID`), because it
    /// too is often started by another launcher.
    ///
    /// A process of a batch script (`sbatch`) that no launcher started is rank 0 of 1, however many tasks the job has:
    /// there, only `srun` sets the world size. But `sbatch` passes Slurm's variables on, even with `--export=NONE`: where
    /// it is called by a process of another step, unset `SLURM_STEP_NUM_TASKS` for it.
    ///
    /// # Errors
    ///
    /// [`LaunchError`] if one variable of a pair is missing or is no number, or if two launchers disagree.
    ///
    /// # Examples
    ///
    /// ```
    /// use twinbuf_mmap::Plan;
    /// let plan = Plan::from_env(1000)?.batch(10).build()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn from_env(records: u64) -> Result<PlanBuilder, LaunchError> {
        let read = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        let (rank, world) = shard(&read)?.unwrap_or((0, 1));
        Ok(Plan::builder(records).shard(rank, world))
    }
}

/// The rank and the world size that the variables say, if there are any.
fn shard(read: &dyn Fn(&str) -> Option<String>) -> Result<Option<(u64, u64)>, LaunchError> {
    if read(TORCHRUN).is_some() {
        return pair(&LAUNCHERS[0], read);
    }
    let mut found: Option<(&Launcher, (u64, u64))> = None;
    for launcher in &LAUNCHERS {
        match (found, pair(launcher, read)?) {
            (None, Some(shard)) => found = Some((launcher, shard)),
            (Some((first, wanted)), Some(shard)) if wanted != shard => {
                return Err(LaunchError::Conflict {
                    first: first.name,
                    wanted,
                    second: launcher.name,
                    found: shard,
                });
            }
            _ => {}
        }
    }
    match found {
        Some((_, shard)) => Ok(Some(shard)),
        None if read(SLURM.world).is_none() => Ok(None),
        None => pair(&SLURM, read),
    }
}

/// What one launcher says: both of its variables, or none.
fn pair(
    launcher: &Launcher,
    read: &dyn Fn(&str) -> Option<String>,
) -> Result<Option<(u64, u64)>, LaunchError> {
    let number = |name: &'static str, found: String| {
        found.trim().parse::<u64>().map_err(|_| LaunchError::NotANumber { name, found })
    };
    let Launcher { rank, world, .. } = *launcher;
    match (read(rank), read(world)) {
        (None, None) => Ok(None),
        (Some(_), None) => Err(LaunchError::Missing { wanted: world, found: rank }),
        (None, Some(_)) => Err(LaunchError::Missing { wanted: rank, found: world }),
        (Some(r), Some(w)) => Ok(Some((number(rank, r)?, number(world, w)?))),
    }
}

/// Why the environment does not say which rank this is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LaunchError {
    /// One variable of a pair is set and the other is not.
    Missing {
        /// The variable that is not set.
        wanted: &'static str,
        /// The variable that is.
        found: &'static str,
    },
    /// A variable is no whole number from 0.
    NotANumber {
        /// The variable.
        name: &'static str,
        /// Its value.
        found: String,
    },
    /// Two launchers say different things, as (rank, world size).
    Conflict {
        /// One launcher.
        first: &'static str,
        /// What it says.
        wanted: (u64, u64),
        /// Another launcher.
        second: &'static str,
        /// What that one says.
        found: (u64, u64),
    },
}

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { wanted, found } => {
                write!(f, "environment: wanted {wanted} beside {found}, found it unset")
            }
            Self::NotANumber { name, found } => {
                write!(f, "environment: {name}: wanted a whole number from 0, found {found:?}")
            }
            Self::Conflict { first, wanted, second, found } => write!(
                f,
                "environment: {first} says rank {} of {}, {second} says rank {} of {}: unset the one that does \
                 not apply",
                wanted.0, wanted.1, found.0, found.1
            ),
        }
    }
}

impl std::error::Error for LaunchError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Option<(u64, u64)>, LaunchError> {
        shard(&|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_string()))
    }

    #[test]
    fn each_launcher_alone() {
        assert_eq!(of(&[("HOME", "/root")]), Ok(None));
        assert_eq!(of(&[("RANK", "3"), ("WORLD_SIZE", "8")]), Ok(Some((3, 8))));
        assert_eq!(of(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")]), Ok(Some((1, 2))));
        assert_eq!(of(&[("PMI_RANK", "0"), ("PMI_SIZE", "4")]), Ok(Some((0, 4))));
        assert_eq!(of(&[("SLURM_PROCID", "5"), ("SLURM_STEP_NUM_TASKS", "6")]), Ok(Some((5, 6))));
    }

    /// The variables are those that a process had that Slurm 22.05 started in each of these ways.
    #[test]
    fn slurms_numbers_are_those_of_srun() {
        const NAMES: [&str; 4] = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"];
        for (how, values, wanted) in [
            ("srun -n 4", ["3", "4", "0", "4"], Some((3, 4))),
            ("sbatch -n 4", ["0", "4", "", ""], None),
            ("sbatch", ["0", "", "", ""], None),
            ("salloc -n 2", ["", "2", "", ""], None),
            ("salloc -n 2, its interactive step", ["0", "2", "4294967290", "1"], Some((0, 1))),
            ("sbatch -n 4, within it srun -n 2", ["1", "2", "0", "2"], Some((1, 2))),
            ("sbatch -n 4, within it srun -n 2 --preserve-env", ["1", "4", "0", "2"], Some((1, 2))),
        ] {
            let variables = NAMES.into_iter().zip(values).filter(|(_, value)| !value.is_empty());
            assert_eq!(of(&variables.collect::<Vec<_>>()), Ok(wanted), "{how}");
        }
        let error = of(&[("SLURM_STEP_NUM_TASKS", "4")]).unwrap_err();
        assert_eq!(error, LaunchError::Missing { wanted: "SLURM_PROCID", found: "SLURM_STEP_NUM_TASKS" });
    }

    #[test]
    fn the_launcher_closest_to_the_process_counts() {
        let slurm = [("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2")];
        let mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")];
        let torchrun = [("RANK", "9"), ("WORLD_SIZE", "16"), ("TORCHELASTIC_RUN_ID", "none")];
        assert_eq!(of(&[&slurm[..], &[("RANK", "9"), ("WORLD_SIZE", "16")]].concat()), Ok(Some((9, 16))));
        assert_eq!(of(&[&slurm[..], &mpi, &torchrun].concat()), Ok(Some((9, 16))));
    }

    #[test]
    fn launchers_that_agree_and_that_do_not() {
        let mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")];
        assert_eq!(of(&[&mpi[..], &[("RANK", "1"), ("WORLD_SIZE", "2")]].concat()), Ok(Some((1, 2))));
        let error = of(&[&mpi[..], &[("PMI_RANK", "0"), ("PMI_SIZE", "2")]].concat()).unwrap_err();
        assert_eq!(
            error,
            LaunchError::Conflict { first: "Open MPI", wanted: (1, 2), second: "PMI", found: (0, 2) }
        );
        assert_eq!(
            error.to_string(),
            "environment: Open MPI says rank 1 of 2, PMI says rank 0 of 2: unset the one that does not apply"
        );
    }

    #[test]
    fn half_a_pair_and_no_number() {
        assert_eq!(of(&[("RANK", "0")]), Err(LaunchError::Missing { wanted: "WORLD_SIZE", found: "RANK" }));
        let error = of(&[("WORLD_SIZE", "4")]).unwrap_err();
        assert_eq!(error.to_string(), "environment: wanted RANK beside WORLD_SIZE, found it unset");
        for bad in ["", "-1", "two", "1.5", "18446744073709551616"] {
            let error = of(&[("PMI_RANK", bad), ("PMI_SIZE", "4")]).unwrap_err();
            assert_eq!(error, LaunchError::NotANumber { name: "PMI_RANK", found: bad.to_string() });
        }
        assert_eq!(of(&[("PMI_RANK", " 2 "), ("PMI_SIZE", "4\n")]), Ok(Some((2, 4))), "spaces do no harm");
    }
}
