#!/usr/bin/env bash
# Measure every figure of docs/performance.md and docs/kernels.md on one GPU, step by step.
#
#   bash bench/gpu_session.sh                       all steps; a second call goes on after the last finished one
#   bash bench/gpu_session.sh --within 570          in so many seconds: each step gets its part and leaves out what is over
#   bash bench/gpu_session.sh peers end_to_end      these steps alone; --again repeats finished ones
#
# step         minutes on an H200   what it appends to bench/results/ (or to $RESULTS)
# compile      0.5                  nothing: compiles the kernels of all rows, all formats at once
# decode       4                    decode.jsonl: warp and tile on every row of the bar
# peers        2                    peers.jsonl: other libraries, where they can be imported
# end_to_end   4                    end_to_end.jsonl: a whole model, every context and batch
# ncu          3                    profile.jsonl: what bounds each kernel (needs ncu, and root or open counters)
# classical    2                    decode.jsonl: the classical path beside warp and tile, for README's table
# grouped      3                    grouped.jsonl: batches beyond decode, of which crossovers are made
# shared       1                    shared.jsonl: shared experts fused, and as a layer of their own
# accuracy     1                    accuracy.jsonl: every path against FP64
#
# On two GPUs, where asked for by name (a layer of 256 experts and all its rows takes about a minute):
# ep_bar, ep_ablation               expert_parallel.jsonl: the rows of the bar, one knob at a time
# ep_verify                         ep_verify.jsonl: 20 cases of each of 28 layers, 100 replays each, all compared
# ep_soak                           soak.jsonl: 10,000 replays back to back of each form
#
# Minutes are estimates until a run has confirmed them. A step's output is in build/gpu_session/STEP.log. A step that
# fails or runs out of time does not stop the next one; the exit code is 1 then. Where the code runs without its git
# history, name its commit in WARPRING_COMMIT. Afterwards `make tables` writes the tables and plots.
set -uo pipefail
cd "$(dirname "$0")/.."

ALL=(compile decode peers end_to_end ncu classical grouped shared accuracy)
declare -A SHARE=([compile]=30 [decode]=180 [peers]=100 [end_to_end]=180 [ncu]=160 [classical]=90 [grouped]=150 [shared]=60 [accuracy]=60
  [ep_bar]=400 [ep_ablation]=300 [ep_verify]=150 [ep_soak]=70)
STATE="${STATE:-build/gpu_session}"
RESULTS="${RESULTS:-bench/results}"
if [ -z "${PYTHON:-}" ]; then PYTHON=python3; [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python; fi
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

within="" again="" steps=()
while [ $# -gt 0 ]; do
  case "$1" in
    --within) within="$2"; shift ;;
    --again) again=yes ;;
    -h | --help) sed -n '2,29s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *)
      if [ -z "${SHARE[$1]:-}" ]; then echo "no step is called '$1'; there are: ${ALL[*]}" >&2; exit 2; fi
      steps+=("$1") ;;
  esac
  shift
done
[ ${#steps[@]} -gt 0 ] || steps=("${ALL[@]}")
mkdir -p "$STATE" "$RESULTS"

# run_step NAME SECONDS: the step's command; SECONDS is what it may take, for those that can leave rows out.
run_step() {
  local budget=$(($2 - 10))
  case "$1" in
    compile) compile_all ;;
    decode) "$PYTHON" bench/decode.py --bar --paths warp,tile --output "$RESULTS/decode.jsonl" --time-budget "$budget" ;;
    peers) "$PYTHON" bench/peers.py --output "$RESULTS/peers.jsonl" --time-budget "$budget" ;;
    end_to_end) "$PYTHON" bench/end_to_end.py --output "$RESULTS/end_to_end.jsonl" --time-budget "$budget" ;;
    ncu) profile_all ;;
    classical) "$PYTHON" bench/decode.py --output "$RESULTS/decode.jsonl" --time-budget "$budget" ;;
    grouped) "$PYTHON" bench/grouped.py --output "$RESULTS/grouped.jsonl" --time-budget "$budget" ;;
    shared) "$PYTHON" bench/shared.py --output "$RESULTS/shared.jsonl" ;;
    ep_bar | ep_ablation)
      "$PYTHON" -m torch.distributed.run --nproc-per-node 2 bench/expert_parallel.py "${1#ep_}" \
        --output "$RESULTS/expert_parallel.jsonl" --time-budget "$budget" ;;
    ep_verify)
      "$PYTHON" -m torch.distributed.run --nproc-per-node 2 -m warpring ep-verify --jsonl "$RESULTS/ep_verify.jsonl" ;;
    ep_soak)
      "$PYTHON" -m torch.distributed.run --nproc-per-node 2 -m warpring ep-verify --soak 10000 \
        --jsonl "$RESULTS/soak.jsonl" ;;
    accuracy) "$PYTHON" -m warpring verify --jsonl "$RESULTS/accuracy.jsonl" ;;
  esac
}

# One process a model and format, all at once: NVRTC works on one core.
compile_all() {
  "$PYTHON" -c 'from warpring.bench.bar import groups
for model, format in dict.fromkeys(key[:2] for key in groups()): print(model, format)' |
    while read -r model format; do
      case "$model" in h[0-9]*) option=--shape ;; *) option=--model ;; esac
      "$PYTHON" -m warpring precompile "$option" "$model" --format "$format" &
    done
  wait
}

# The layers of the bar that miss rows in ways of their own; one that cannot be profiled does not stop the next.
profile_all() {
  local layer code=0
  for layer in "qwen3-30b-a3b mxfp8,mxfp4,bf16" "gpt-oss-120b mxfp4" "deepseek-v3-ep8 fp8_block" "h2048xi512xe256xk8 fp8_block" \
    "qwen3-235b-a22b mxfp8"; do
    "$PYTHON" bench/ncu_profile.py --model "${layer% *}" --formats "${layer#* }" --output "$RESULTS/profile.jsonl" || code=3
  done
  return "$code"
}
export -f run_step compile_all profile_all
export PYTHON RESULTS

start=$SECONDS failed=0
for index in "${!steps[@]}"; do
  step="${steps[$index]}"
  if [ -e "$STATE/$step.done" ] && [ -z "$again" ]; then
    echo "$step: done before; --again repeats it"
    continue
  fi
  seconds=1800
  if [ -n "$within" ]; then
    total=0
    for later in "${steps[@]:$index}"; do total=$((total + SHARE[$later])); done
    seconds=$(((within - SECONDS + start) * SHARE[$step] / total))
    if [ "$seconds" -lt 5 ]; then
      echo "$step: left out, $seconds s are left for it"
      failed=1
      continue
    fi
  fi
  begin=$SECONDS
  timeout -k 10 "$seconds" bash -c 'run_step "$@"' step "$step" "$seconds" >"$STATE/$step.log" 2>&1
  code=$?
  # 1 from decode.py and grouped.py: rows were left out by the budget; what was measured is recorded, and the step is not finished.
  if [ "$code" -eq 0 ]; then touch "$STATE/$step.done"; else failed=1; fi
  echo "$step: exit code $code after $((SECONDS - begin)) s of $seconds; $STATE/$step.log"
  [ "$code" -eq 0 ] || tail -n 3 "$STATE/$step.log" | sed 's/^/    /'
done
exit $failed
