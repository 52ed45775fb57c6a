//! Rank and world size of this process, from the environment variables of its launcher.

use super::{Plan, PlanBuilder};

/// The two variables that a launcher sets for every process it starts: rank and world size.
type Launcher = [&'static str; 2];

/// Pairs that are set for each process, not for each node.
///
/// Sources: torchrun's documentation ("Environment Variables"); Open MPI's manual of `mpirun` ("Environment
/// Variables"); the PMI-1 wire protocol of Hydra (MPICH, Intel MPI); MVAPICH2's user guide; Horovod's `gloo_run.py`;
/// `flux-environment(7)`; IBM's documentation of `jsrun`; `jax.distributed.initialize`.
const LAUNCHERS: [Launcher; 8] = [
    TORCHRUN,
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
    ["PMI_RANK", "PMI_SIZE"],
    ["MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"],
    ["HOROVOD_RANK", "HOROVOD_SIZE"],
    ["FLUX_TASK_RANK", "FLUX_JOB_SIZE"],
    ["JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"],
    ["JAX_PROCESS_ID", "JAX_NUM_PROCESSES"],
];

const TORCHRUN: Launcher = ["RANK", "WORLD_SIZE"];

/// Slurm starts the processes itself (`srun`), or starts one of the launchers above once per node. In the second case,
/// Slurm's numbers are those of the launchers, not of the processes.
///
/// Slurm sets `SLURM_STEP_NUM_TASKS` only for the processes of a job step. The manual of `srun` lists the variable
/// ("Output environment variables"), and that of `sbatch` does not. Slurm's `src/common/env.c` sets it in
/// `env_array_for_step`, not in `env_array_for_batch_job`. A batch script also has `SLURM_PROCID`, which is 0, and
/// `SLURM_NTASKS` if its job was given a number of tasks.
const SLURM: Launcher = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"];

/// A variable that torchrun sets for its workers. If torchrun's pair is set too, torchrun is the launcher closest to
/// the process.
const ELASTIC: &str = "TORCHELASTIC_RUN_ID";

/// The rank within its node of a process that Slurm started. It is also set in a batch script, to 0.
const SLURM_LOCAL: &str = "SLURM_LOCALID";

/// Variables with the rank among all processes, but without the number of ranks: `PMIx` (Open MPI, `srun --mpi=pmix`),
/// PALS (HPE Cray) and ALPS (Cray).
const RANKS: [&str; 3] = ["PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE"];

/// Other variables that launchers and clusters set. None is the rank among all processes: they name a job, or number
/// nodes, pods, hosts or the processes of one node. `PET_` are torchrun's options, for example from Kubeflow.
/// `NODE_RANK` is from Lightning and others that start processes node by node. The last ones are from `TensorFlow`,
/// `SageMaker`, Cloud TPU and indexed jobs of Kubernetes.
const MARKS: &str = "TORCHELASTIC_RUN_ID LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK PET_NNODES PET_NODE_RANK \
    PET_NPROC_PER_NODE NODE_RANK OMPI_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID MPI_LOCALNRANKS PMIX_NAMESPACE \
    MV2_COMM_WORLD_LOCAL_RANK HOROVOD_LOCAL_RANK FLUX_TASK_LOCAL_ID PALS_LOCAL_RANKID PALS_APID \
    JSM_NAMESPACE_LOCAL_RANK TF_CONFIG SM_HOSTS SM_CURRENT_HOST TPU_WORKER_ID JOB_COMPLETION_INDEX";

impl Plan {
    /// Returns a builder as [`builder`](Plan::builder) does, with the rank and the world size from the environment
    /// variables of the launcher. Without a launcher, the rank is 0 of 1.
    ///
    /// | launcher | rank | world size |
    /// | --- | --- | --- |
    /// | torchrun | `RANK` | `WORLD_SIZE` |
    /// | Open MPI | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` |
    /// | PMI (Hydra: MPICH, Intel MPI) | `PMI_RANK` | `PMI_SIZE` |
    /// | MVAPICH2 | `MV2_COMM_WORLD_RANK` | `MV2_COMM_WORLD_SIZE` |
    /// | Horovod | `HOROVOD_RANK` | `HOROVOD_SIZE` |
    /// | Flux | `FLUX_TASK_RANK` | `FLUX_JOB_SIZE` |
    /// | jsrun (LSF) | `JSM_NAMESPACE_RANK` | `JSM_NAMESPACE_SIZE` |
    /// | JAX | `JAX_PROCESS_ID` | `JAX_NUM_PROCESSES` |
    /// | Slurm (`srun`) | `SLURM_PROCID` | `SLURM_STEP_NUM_TASKS` |
    ///
    /// Another launcher often starts torchrun: if `TORCHELASTIC_RUN_ID` and both variables of
    /// torchrun are set, no others are read. Otherwise, Slurm's variables are used only if no other
    /// pair is set, because Slurm may have started another launcher once per node. All other pairs that are set
    /// must agree. `PMIX_RANK`, `PALS_RANKID` and `ALPS_APP_PE`, if set, must equal the rank.
    ///
    /// A process of a batch script (`sbatch`) that no launcher started is rank 0 of 1, regardless of the number of
    /// tasks of the job, because only `srun` sets the world size. `sbatch` passes on Slurm's variables, even with
    /// `--export=NONE`: if a process of a job step calls `sbatch`, unset `SLURM_STEP_NUM_TASKS` for the call.
    ///
    /// # Errors
    ///
    /// [`RankError`], which names the variables:
    ///
    /// - Only one variable of a pair is set. For Slurm's pair, this is no error in a batch script, or if another pair
    ///   is set.
    /// - A rank or world size that is used is not a nonnegative integer of 64 bits.
    /// - The rank is not less than the world size.
    /// - Two launchers or ranks that must agree do not.
    /// - A launcher or a cluster set other variables but no pair, for example `LOCAL_RANK`,
    ///   `PMIX_RANK`, `NODE_RANK`, `PET_NNODES`, `TF_CONFIG`, `SM_HOSTS`, `TPU_WORKER_ID` or `JOB_COMPLETION_INDEX`.
    ///   Set the numbers with [`PlanBuilder::rank`].
    ///
    /// # Examples
    ///
    /// ```
    /// use twinbuf_mmap::Plan;
    /// let plan = Plan::from_env(1000)?.batch(10).build()?;
    /// println!("rank {} of {}", plan.rank(), plan.world());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn from_env(records: u64) -> Result<PlanBuilder, RankError> {
        let read = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        let (rank, world) = find(&read)?.map_or((0, 1), |found| (found.rank, found.world));
        Ok(Plan::builder(records).rank(rank, world))
    }
}

/// A launcher that has set its variables, and their values.
#[derive(Clone, Copy)]
struct Found {
    launcher: Launcher,
    rank: u64,
    world: u64,
}

/// Reads a variable of the environment.
type Read<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Returns the launcher closest to the process, and its numbers. Fails as [`Plan::from_env`] documents.
fn find(read: Read<'_>) -> Result<Option<Found>, RankError> {
    if [ELASTIC, TORCHRUN[0], TORCHRUN[1]].into_iter().all(|name| read(name).is_some()) {
        return pair(TORCHRUN, read);
    }
    let mut found: Option<Found> = None;
    for launcher in LAUNCHERS {
        let Some(other) = pair(launcher, read)? else { continue };
        let first = *found.get_or_insert(other);
        if (first.rank, first.world) != (other.rank, other.world) {
            let [one, two] = [first, other]
                .map(|Found { launcher: [a, b], rank, world }| format!("{a} and {b} are {rank} and {world}"));
            return Err(RankError(format!("{one}, {two}: unset the pair that does not apply")));
        }
    }
    if found.is_none() && read(SLURM[1]).is_some() {
        found = pair(SLURM, read)?;
    }
    for name in RANKS {
        let Some(value) = read(name) else { continue };
        let rank = number(name, &value)?;
        let Found { launcher, rank: first, .. } = found.ok_or_else(|| no_world(name))?;
        if first != rank {
            let both = format!("{} is {first} and {name} is {rank}", launcher[0]);
            return Err(RankError(format!("{both}: unset the one that does not apply")));
        }
    }
    if found.is_none() {
        if let Some(name) = MARKS.split_whitespace().find(|name| read(name).is_some()) {
            return Err(no_world(name));
        }
        // Slurm sets both to 0 in a batch script, which is one process alone.
        for name in [SLURM[0], SLURM_LOCAL] {
            let Some(value) = read(name) else { continue };
            if number(name, &value)? > 0 || read(SLURM[0]).is_none() {
                return Err(missing(SLURM[1], name));
            }
        }
    }
    Ok(found)
}

/// Returns the numbers of one launcher, if both of its variables are set. Fails if only one is set,
/// or if they are no rank and world size.
fn pair(launcher: Launcher, read: Read<'_>) -> Result<Option<Found>, RankError> {
    let [rank, world] = launcher;
    match (read(rank), read(world)) {
        (None, None) => Ok(None),
        (Some(_), None) => Err(missing(world, rank)),
        (None, Some(_)) => Err(missing(rank, world)),
        (Some(r), Some(w)) => match (number(rank, &r)?, number(world, &w)?) {
            (found, below) if found >= below => {
                Err(RankError(format!("{rank} must be below {world}, which is {below}: found {found}")))
            }
            (rank, world) => Ok(Some(Found { launcher, rank, world })),
        },
    }
}

fn number(name: &str, found: &str) -> Result<u64, RankError> {
    let wrong = |_| RankError(format!("{name}: wanted a whole number from 0, found {found:?}"));
    found.trim().parse().map_err(wrong)
}

fn missing(wanted: &str, found: &str) -> RankError {
    RankError(format!("{found} is set and {wanted} is not: set both, or unset {found}"))
}

fn no_world(name: &str) -> RankError {
    RankError(format!(
        "{name} is set, so a launcher started this process, but no known variables give its rank and the number of \
        ranks: set them with `PlanBuilder::rank`, or unset {name}"
    ))
}

/// Launchers' variables in the environment are incomplete, invalid or disagree. The message names the variables and
/// what is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("environment: {0}")]
pub struct RankError(String);

#[cfg(test)]
mod tests {
    use super::*;

    /// Finds the launcher with these variables, separated by `;`.
    fn of(variables: &str) -> Result<Option<(u64, u64)>, RankError> {
        let pairs = || variables.split(';').filter_map(|pair| pair.split_once('='));
        let read = |name: &str| pairs().find(|(key, _)| *key == name).map(|(_, value)| value.to_owned());
        Ok(find(&read)?.map(|found| (found.rank, found.world)))
    }

    #[test]
    fn what_is_made_of_variables() {
        let ok = |rank, world| Ok(Some((rank, world)));
        let no = |message: &str| Err(RankError(message.to_owned()));
        let mpi = "OMPI_COMM_WORLD_RANK=1;OMPI_COMM_WORLD_SIZE=2";
        let [rank, world] = SLURM;
        let slurm = format!("{rank}=2;{world}=3");
        for (variables, wanted) in [
            ("HOME=/root", Ok(None)),
            ("RANK=3;WORLD_SIZE=8", ok(3, 8)),
            (mpi, ok(1, 2)),
            ("PMI_RANK=0;PMI_SIZE=4", ok(0, 4)),
            (&slurm, ok(2, 3)),
            // Spaces do no harm.
            ("PMI_RANK= 2 ;PMI_SIZE=4\n", ok(2, 4)),
            // The launcher closest to the process counts.
            (&format!("{slurm};RANK=9;WORLD_SIZE=16"), ok(9, 16)),
            (&format!("{slurm};{mpi};RANK=9;WORLD_SIZE=16;TORCHELASTIC_RUN_ID=none"), ok(9, 16)),
            // Launchers that agree, and that do not.
            (&format!("{mpi};RANK=1;WORLD_SIZE=2"), ok(1, 2)),
            (
                &format!("{mpi};PMI_RANK=0;PMI_SIZE=2"),
                no(
                    "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE are 1 and 2, PMI_RANK and PMI_SIZE are 0 and 2: \
                    unset the pair that does not apply",
                ),
            ),
            // The process may inherit torchrun's mark from a torchrun that started its launcher, without its numbers.
            (&format!("TORCHELASTIC_RUN_ID=x;{mpi}"), ok(1, 2)),
            (&format!("TORCHELASTIC_RUN_ID=x;{slurm}"), ok(2, 3)),
            ("TORCHELASTIC_RUN_ID=x;RANK=1", Err(missing("WORLD_SIZE", "RANK"))),
            (
                "TORCHELASTIC_RUN_ID=x",
                no(
                    "TORCHELASTIC_RUN_ID is set, so a launcher started this process, but no known variables give its \
                    rank and the number of ranks: set them with `PlanBuilder::rank`, or unset TORCHELASTIC_RUN_ID",
                ),
            ),
            // A rank without a world size must agree.
            (&format!("{slurm};PMIX_RANK=2"), ok(2, 3)),
            (
                &format!("{slurm};PALS_RANKID=1"),
                no("SLURM_PROCID is 2 and PALS_RANKID is 1: unset the one that does not apply"),
            ),
            ("PMIX_RANK=0", Err(no_world("PMIX_RANK"))),
            // Half a pair, and a rank that is not below the world size.
            ("RANK=0", Err(missing("WORLD_SIZE", "RANK"))),
            ("WORLD_SIZE=4", no("WORLD_SIZE is set and RANK is not: set both, or unset WORLD_SIZE")),
            ("RANK=2;WORLD_SIZE=2", no("RANK must be below WORLD_SIZE, which is 2: found 2")),
            ("SLURM_PROCID=1", Err(missing(world, rank))),
            ("SLURM_STEP_NUM_TASKS=4", Err(missing(rank, world))),
            ("SLURM_LOCALID=0;SLURM_NODEID=1", Err(missing(world, SLURM_LOCAL))),
            ("SLURM_PROCID=0;SLURM_LOCALID=1", Err(missing(world, SLURM_LOCAL))),
            // A batch script.
            ("SLURM_PROCID=0;SLURM_LOCALID=0", Ok(None)),
        ] {
            assert_eq!(of(variables), wanted, "{variables}");
        }
        for bad in ["", "-1", "two", "1.5", "18446744073709551616"] {
            let wanted = format!("environment: PMI_RANK: wanted a whole number from 0, found {bad:?}");
            assert_eq!(of(&format!("PMI_RANK={bad};PMI_SIZE=4")).unwrap_err().to_string(), wanted);
        }
    }

    /// The variables of processes that Slurm 22.05 started in each of these ways.
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
            let pairs = NAMES.into_iter().zip(values).filter(|(_, value)| !value.is_empty());
            let variables: Vec<String> = pairs.map(|(name, value)| format!("{name}={value}")).collect();
            assert_eq!(of(&variables.join(";")), Ok(wanted), "{how}");
        }
    }

    /// Sets each variable alone, and each pair of variables, for rank 1 of 2. The result must be these numbers or an
    /// error. It must never be rank 0 of 1: every rank would then read all data.
    #[test]
    fn no_variable_gives_a_silent_rank_0_of_1() {
        let pairs = || LAUNCHERS.into_iter().chain([SLURM]);
        let mut variables: Vec<(&str, &str)> =
            pairs().flat_map(|[rank, world]| [(rank, "1"), (world, "2")]).collect();
        // Also with the value 0: the first of several processes or nodes must not be taken for the only one.
        let alone = RANKS.into_iter().chain(MARKS.split_whitespace()).chain([SLURM_LOCAL]);
        variables.extend(alone.flat_map(|name| [(name, "1"), (name, "0")]));
        let mut complete = 0;
        for first in &variables {
            for second in &variables {
                // Skip a variable with two values. A pair of the same variable and value tests that variable alone.
                let names = [first.0, second.0];
                if names[0] == names[1] && first.1 != second.1 {
                    continue;
                }
                let whole = pairs().any(|[rank, world]| names.contains(&rank) && names.contains(&world));
                match of(&format!("{}={};{}={}", first.0, first.1, second.0, second.1)) {
                    Ok(found) => {
                        assert_eq!(found, Some((1, 2)), "{names:?}");
                        assert!(whole, "{names:?}");
                        complete += 1;
                    }
                    Err(error) => {
                        assert!(!whole, "{names:?}: {error}");
                        let text = error.to_string();
                        assert!(names.iter().any(|name| text.contains(name)), "{names:?}: {text}");
                    }
                }
            }
        }
        assert_eq!(complete, 2 * pairs().count());
    }

    #[test]
    fn clusters_that_name_no_rank() {
        for variable in [
            r#"TF_CONFIG={"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}"#,
            r#"SM_HOSTS=["algo-1", "algo-2"]"#,
            "TPU_WORKER_ID=3",
            "JOB_COMPLETION_INDEX=0",
            "NODE_RANK=0",
            "PET_NNODES=2",
            "ALPS_APP_PE=0",
        ] {
            assert_eq!(of(variable), Err(no_world(variable.split('=').next().unwrap())));
            let jax = format!("{variable};JAX_PROCESS_ID=0;JAX_NUM_PROCESSES=2");
            assert_eq!(of(&jax), Ok(Some((0, 2))), "{variable}");
        }
    }
}
