#!/bin/bash
# Job train, rendered by envforge for podman; render again instead of editing.
#SBATCH --job-name=train.ed59ebd5
#SBATCH --comment=envforge:ed59ebd543ecf50b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64000M
#SBATCH --gres=gpu:8
#SBATCH --time=600
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --constraint=a100&nvlink
#SBATCH --signal=B:TERM@120
#SBATCH --output=/shared/jobs/train/%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
set -u
say() { printf 'envforge: %s\n' "$*" >&2; }
# Every value below is one quoted word: no shell reads what stands in it.
output=/shared/jobs/train
logs=/shared/jobs/train
command=(
    torchrun
    train.py
    --lr
    2e-4
)

# Of the machine that submitted nothing comes along but these: no library path, no Python path, no module's leftovers.
while IFS= read -r name; do
    case $name in
    SLURM* | SPANK* | PATH | HOME | USER | LOGNAME | SHELL | XDG_RUNTIME_DIR | HF_ENDPOINT | HF_TOKEN | HTTPS_PROXY | HTTP_PROXY | LANG | LC_ALL | NO_PROXY | TZ | http_proxy | https_proxy | no_proxy) ;;
    *) unset -v "$name" 2>/dev/null ;;
    esac
done < <(compgen -e)
[ -n "${HF_TOKEN-}" ] || { say "the secret HF_TOKEN is not in the environment of whoever submitted this job"; exit 2; }
export HF_HUB_OFFLINE=1
export RUN='first try'
# The steps get all of this, whatever a site's default for --export made of the batch script.
export SLURM_EXPORT_ENV=ALL
export ENVFORGE_OUTPUT="$output" ENVFORGE_JOB=slurm ENVFORGE_RESTARTS="${SLURM_RESTART_COUNT:-0}"
export ENVFORGE_IMAGE_DIGEST=sha256:cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd
mkdir -p -- "$output"

# The first node of the list holds the rendezvous. A name that cannot be looked up gives way to Slurm's own address.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${nodes[0]}
if ! getent hosts "$MASTER_ADDR" >/dev/null; then
    address=$(scontrol show node "$MASTER_ADDR" --oneliner | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    MASTER_ADDR=${address:-$MASTER_ADDR}
fi
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
WORLD_SIZE=2 LOCAL_WORLD_SIZE=1
export MASTER_ADDR MASTER_PORT WORLD_SIZE LOCAL_WORLD_SIZE
command=("${command[0]}" "--nnodes=2" "--node-rank=@" "--master-addr=$MASTER_ADDR" "--master-port=$MASTER_PORT" "--nproc-per-node=8" "${command[@]:1}")

flags=(
)
launch=(
    podman
    run
    --rm
    --name=@
    --network=host
    --ipc=host
    --ulimit=memlock=-1:-1
    --device=@
    --mount=type=bind,source=/data/texts,target=/data,readonly
    --mount=type=bind,source=/shared/jobs/train,target=/shared/jobs/train
    --env=ENVFORGE_IMAGE_DIGEST
    --env=ENVFORGE_JOB
    --env=ENVFORGE_NODE
    --env=ENVFORGE_OUTPUT
    --env=ENVFORGE_PREFLIGHT
    --env=ENVFORGE_RESTARTS
    --env=HF_ENDPOINT
    --env=HF_HUB_OFFLINE
    --env=HF_TOKEN
    --env=HTTPS_PROXY
    --env=HTTP_PROXY
    --env=LANG
    --env=LC_ALL
    --env=LOCAL_RANK
    --env=LOCAL_WORLD_SIZE
    --env=MASTER_ADDR
    --env=MASTER_PORT
    --env=NODE_RANK
    --env=NO_PROXY
    --env=RANK
    --env=RUN
    --env=SLURMD_NODENAME
    --env=SLURM_CPUS_PER_TASK
    --env=SLURM_JOB_ID
    --env=SLURM_JOB_NODELIST
    --env=SLURM_LOCALID
    --env=SLURM_NNODES
    --env=SLURM_NODEID
    --env=SLURM_NTASKS
    --env=SLURM_PROCID
    --env=TZ
    --env=WORLD_SIZE
    --env=http_proxy
    --env=https_proxy
    --env=no_proxy
    --entrypoint=/opt/envforge/bin/envforge-entrypoint
    registry.example:5000/envforge/unsloth:2.6.0-cu126-0123456789ab
)
own=$((${#launch[@]} + 6))
# What each task does first: say who it is, then become the command. @ stands for what only the task knows.
task='
box=envforge-$SLURM_JOB_ID-$SLURM_STEP_ID-$SLURM_PROCID
gpus=${SLURM_STEP_GPUS-${SLURM_JOB_GPUS-${CUDA_VISIBLE_DEVICES-}}}
export RANK="${RANK-${SLURM_PROCID-0}}" LOCAL_RANK="${LOCAL_RANK-${SLURM_LOCALID-0}}"
export NODE_RANK="${NODE_RANK-${SLURM_NODEID-0}}" ENVFORGE_NODE="${ENVFORGE_NODE-${SLURMD_NODENAME-$(uname -n)}}"
left=$1
shift
for word do
    shift
    # Only words of our own: the first ones.
    [ "$left" -gt 0 ] && case $word in
    --node-rank=@) word=--node-rank=$NODE_RANK ;;
    --json=@) word=--json=$ENVFORGE_OUTPUT/receipt-$ENVFORGE_NODE.json ;;
    --name=@) word=--name=$box ;;
    --gpus=@) word=--gpus=\"device=$gpus\" ;;
    --device=@)
        for one in $(echo "$gpus" | tr , " "); do
            set -- "$@" "--device=nvidia.com/gpu=$one"
        done
        left=$((left - 1))
        continue
        ;;
    esac
    left=$((left - 1))
    set -- "$@" "$word"
done
# The engine runs the container outside of this job, so it is told when the job ends.
"$@" &
client=$!
trap "podman stop --time 20 $box >/dev/null" TERM INT
code=0
wait "$client" || code=$?
while kill -0 "$client" 2>/dev/null; do
    code=0
    wait "$client" || code=$?
done
exit "$code"
'

# run NAME TASKS WORD...: one step, whose tasks become the image's entrypoint with these words.
run() {
    local name=$1 tasks=$2 log=()
    shift 2
    [ "$name" = preflight ] || log=(--output="$logs/%j-rank%t.log" --error="$logs/%j-rank%t.log" --open-mode=append)
    srun --nodes=2 --ntasks="$tasks" --ntasks-per-node="$((tasks / 2))" --job-name="$name" \
        --cpus-per-task=16 \
        --kill-on-bad-exit="$([ "$name" = preflight ] && echo 0 || echo 1)" --input=none "${log[@]}" "${flags[@]}" \
        /bin/sh -c "$task" envforge-task "$own" "${launch[@]}" "$@"
}

# The preflight: once per node, in milliseconds, before the command. 86 is its word for a node that cannot run the image.
run preflight 2 preflight --nodes=2 --gpus=8 --own --address=abababababababababababababababababababababababababababababababab --write="$output/preflight-$SLURM_JOB_ID-{node}.json"
code=$?
if [ "$code" = 86 ]; then
    say "a node was refused, see the lines above; the command was not started"
    exit 86
elif [ "$code" != 0 ]; then
    say "the container could not be started (exit code $code), see the lines above"
    exit "$code"
fi
export ENVFORGE_PREFLIGHT=done

# SIGTERM comes some time before the limit: it is passed on, so that a checkpoint can be written.
told=
tell() {
    told=yes
    trap '' TERM
    say "$(date -u +%FT%TZ) the time is nearly up: SIGTERM to the tasks"
    scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null
}
trap tell TERM
run tasks 2 "${command[@]}" &
step=$!
wait "$step"
code=$?
if [ -n "$told" ]; then
    # That was the signal, not the end of the tasks.
    wait "$step"
    again=$?
    [ "$again" = 127 ] || code=$again
fi
# Only a job that runs goes back to the queue: a cancelled one is at its end already.
if [ -n "$told" ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T 2>/dev/null)" = RUNNING ]; then
    if [ "${SLURM_RESTART_COUNT:-0}" -ge 50 ]; then
        say "back in the queue 50 times already: no more"
        exit "$code"
    fi
    say "the tasks ended with exit code $code after SIGTERM: back to the queue"
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$code"
