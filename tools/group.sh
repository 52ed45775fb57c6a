# Control groups with a memory limit, for scripts that measure; sourced, not run. It takes root.

group='' peak='' how=''

# make_data FOLDER: makes a folder there and sets `data`. It goes with the script, and so does the group.
make_data() {
  data=$(mktemp -d -p "$1" data.XXXXXX)
  trap 'rm -rf "$data"; drop_group' EXIT
  trap 'exit 1' INT TERM
}

# make_group MEBIBYTES: makes a group without swapping and sets `group`, `peak` (the file that has its peak) and `how`.
# Fails if this user cannot.
make_group() {
  local root=/sys/fs/cgroup name=twinbuf.$$
  if grep -qw memory $root/cgroup.controllers 2>/dev/null && mkdir $root/$name 2>/dev/null; then
    group=$root/$name how="cgroup v2" peak=$group/memory.peak
    # Usually the root hands the controller down already. In a container it may not: then there is no limit.
    [[ -e $group/memory.max ]] || echo +memory >$root/cgroup.subtree_control || { drop_group; return 1; }
    echo "${1}M" >"$group/memory.max" || { drop_group; return 1; }
    # Missing where the kernel cannot swap.
    [[ ! -e $group/memory.swap.max ]] || echo 0 >"$group/memory.swap.max"
  elif mkdir $root/memory/$name 2>/dev/null; then
    group=$root/memory/$name how="cgroup v1" peak=$group/memory.max_usage_in_bytes
    echo "${1}M" >"$group/memory.limit_in_bytes" || { drop_group; return 1; }
    echo 0 >"$group/memory.swappiness"
  else
    return 1
  fi
}

# in_group COMMAND...: runs a command in the group.
in_group() {
  bash -c 'echo $$ >"$0/cgroup.procs"; exec "$@"' "$group" "$@"
}

# Removes the group, if there is one.
drop_group() {
  [[ -z $group ]] || rmdir "$group"
  group=
}
