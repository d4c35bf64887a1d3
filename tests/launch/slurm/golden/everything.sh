#!/bin/bash
#SBATCH --job-name=gpt2-ort-ddp
#SBATCH --output=/data/runs/default/20260101-120000-gpt2-ort-ddp-abc123/logs/slurm.log
#SBATCH --open-mode=append
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --partition=gpu,long
#SBATCH --account=physics
#SBATCH --qos=high
#SBATCH --reservation="winter school"
#SBATCH --constraint="a100&nvlink"
#SBATCH --time=2-12
#SBATCH --gres=gpu:a100:8,nvme:1
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --dependency=afterok:1:2
#SBATCH --mail-user=ada@example.org
#SBATCH --mail-type=END,FAIL
#SBATCH --signal=B:USR2@300
#SBATCH --requeue
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --nice=100
#SBATCH --comment="a # comment"

# Written by ortlaunch. On each node srun starts one task, which becomes torchrun for that node's workers. This script
# waits beside them on the first node: it takes SLURM's warning, lets the workers write a checkpoint together, and
# queues the job again.

set -u
run_dir=/data/runs/default/20260101-120000-gpt2-ort-ddp-abc123
exec >>"$run_dir/logs/slurm.log" 2>&1
echo "--- job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST at $(date -Is)"

fail() {
    echo "ortlaunch: $*"
    exit 1
}

cd /home/ada/project || fail "the working folder is not there on $(hostname)"
export PATH=/home/ada/venv/bin:/usr/bin:/bin
set +u
module purge
module load cuda/12.4  # the driver's
set -u

python=/home/ada/venv/bin/python
ours=("$python" -P -m ortlaunch.launch.slurm.job)

# The workers of all nodes meet on the first node. If it is not known, the job fails: each node would start its own run.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") && [ -n "$hosts" ] ||
    fail "scontrol does not list the nodes of $SLURM_JOB_NODELIST: is it on the PATH of $(hostname)?"
export ORTLAUNCH_HEAD="${hosts%%$'\n'*}"
export ORTLAUNCH_PORT=$((15000 + SLURM_JOB_ID % 15000))

on_each_node=(srun --nodes=16 --ntasks=16 --ntasks-per-node=1 --cpus-per-task=64 --cpu-bind=none --mpi=none --export=ALL --network=sn_single)
node=(/home/ada/venv/bin/python -P -m ortlaunch.launch.slurm.node)

# SLURM sends the warning to this shell alone, because torchrun would end the workers while they write their checkpoint.
signals=""
take_warning() {
    signals+=" WARNING"
    if ! [ -e "$run_dir/STOP" ]; then
        echo "requeue" >"$run_dir/.STOP" && mv "$run_dir/.STOP" "$run_dir/STOP"
    fi
    # If the workers have not ended by then, the script goes on, because SLURM ends the job soon after.
    (
        sleep 240 &
        trap 'kill $! 2>/dev/null; exit' TERM
        wait $! && kill -ALRM $$
    ) &
    timer=$!
}
timer=""
trap '[ -z "$timer" ] || kill "$timer" 2>/dev/null' EXIT
trap take_warning USR2
trap 'signals+=" TERM"' TERM
trap 'signals+=" LATE"' ALRM

# Runs a command beside this shell, which goes on taking signals; sets code.
run() {
    "$@" </dev/null &
    local child=$!
    wait "$child"
    code=$?
    while kill -0 "$child" 2>/dev/null && [[ $signals != *LATE* ]]; do
        wait "$child"
        code=$?
    done
}

# Each node reports whether it is fit; a dead node does not answer. This runs beside other steps that still hold the nodes,
# and waits for all nodes, so that no node counts as dead because another one is not fit.
roll_call() {
    rm -rf "$run_dir/preflight"
    run env SLURM_OVERLAP=1 timeout --kill-after=5 90 \
        "${on_each_node[@]}" --kill-on-bad-exit=0 "${node[@]}" preflight "$run_dir"
}

while :; do
    attempt=$("${ours[@]}" begin "$run_dir")
    case $? in
        0) export ORTLAUNCH_ATTEMPT="$attempt" ;;
        3) exit 0 ;; # Done, or ended by a person, while the job was in the queue.
        *) fail "the run cannot begin on $(hostname)" ;;
    esac
    # A signal that ends the workers must not end the relay, which still has to report their end.
    (trap '' TERM && exec "${ours[@]}" relay "$run_dir") &
    relay=$!
    code=0
    roll_call
    [ "$code" = 0 ] || signals+=" UNFIT"
    if [ "$code" = 0 ]; then
        run "${on_each_node[@]}" --kill-on-bad-exit=1 --wait=600 "${node[@]}" train "$run_dir"
        if [ "$code" != 0 ] && [ -z "$signals" ]; then
            # This finds out whether a node was lost, which SLURM itself may notice only minutes later.
            crash=$code
            roll_call
            [ "$code" = 0 ] || signals+=" LOST"
            code=$crash
        fi
    fi
    # One line: again, requeue, or end and an exit code.
    verdict=$("${ours[@]}" decide "$run_dir" "$code" $signals) || verdict="end 1"
    kill -USR1 "$relay" 2>/dev/null
    wait "$relay" || "${ours[@]}" announce "$run_dir"
    [ "$verdict" = again ] || break
    signals=${signals// UNFIT/}
    signals=${signals// LOST/}
    # The warning may have come after the workers had ended.
    if [[ $signals == *WARNING* ]]; then
        verdict=requeue
        break
    fi
done

if [ "$verdict" = requeue ]; then
    # The plain id of the last task of a sweep would mean all of its tasks.
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    for pause in 1 5 15 0; do
        scontrol requeue "${job:-$SLURM_JOB_ID}" && exit 0
        sleep "$pause"
    done
    "${ours[@]}" refused "$run_dir"
    exit 1
fi
exit "${verdict#end }"
