# Quantised checkpoints on GPUs: tests/gpu/quant_engine.sh LAYOUT... (fp8 nvfp4 nvfp4-ct mixed; default all), from the root.
# For each: 35B-A3B of made-up weights is written, loaded cold and warm by one rank, and by two if there are two GPUs; then
# the miniature's sibling answers on the GPU as on the CPU. Needs 40 GB of disk in $TMPDIR; some four minutes a layout.
# Writes JSON under $OUT and prints one table last. SKIP_FULL=1 leaves the large checkpoints out.
set -uo pipefail
export PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false
OUT=${OUT:-/tmp/quant} WORK=$(mktemp -d) GPUS=$(python3 -c 'import torch; print(torch.cuda.device_count())')
GEOMETRY=benchmarks/geometry/qwen3.6-35b-a3b
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$OUT"
ranks() { python3 -m torch.distributed.run --nproc-per-node "$1" --rdzv-backend c10d --rdzv-endpoint localhost:0 -m "${@:2}"; }
for LAYOUT in "${@:-fp8 nvfp4 nvfp4-ct mixed}"; do for L in $LAYOUT; do
  if [ -z "${SKIP_FULL:-}" ]; then
    SECONDS=0
    python3 -m shardwise quantize $GEOMETRY --load-format dummy --device cuda --to "$L" "$WORK/$L" | tee -a "$OUT/table.txt"
    echo "$L: written in $SECONDS s" | tee -a "$OUT/table.txt"
    ranks 1 tests.gpu.quant_load "$WORK/$L" --cold --out "$OUT/$L-1-cold.json" 2>&1 | tee -a "$OUT/log.txt" | grep -E 'GiB|Error' >> "$OUT/table.txt"
    ranks 1 tests.gpu.quant_load "$WORK/$L" --out "$OUT/$L-1-warm.json" 2>&1 | tee -a "$OUT/log.txt" | grep -E 'GiB|Error' >> "$OUT/table.txt"
    if [ "$GPUS" -ge 2 ]; then
      ranks 2 tests.gpu.quant_load "$WORK/$L" --out "$OUT/$L-2.json" 2>&1 | tee -a "$OUT/log.txt" | grep -E 'GiB|Error' >> "$OUT/table.txt"
      ranks 2 tests.gpu.quant_load "$WORK/$L" --ratio 5,3 --out "$OUT/$L-53.json" 2>&1 | tee -a "$OUT/log.txt" | grep -E 'GiB|Error' >> "$OUT/table.txt"
    fi
    rm -rf "${WORK:?}/$L"
  fi
  python3 -m shardwise quantize src/shardwise/miniature --to "$L" "$WORK/mini-$L" >> "$OUT/log.txt"
  for HOW in "1 cpu float32" "1 cuda float32" "1 cuda bfloat16" "2 cuda float32"; do
    read -r N DEVICE DTYPE <<< "$HOW"
    [ "$N" -gt "$GPUS" ] && continue
    ranks "$N" tests.gpu.engine_case answers --model "$WORK/mini-$L" --device "$DEVICE" --dtype "$DTYPE" --out "$OUT/mini-$L-$N-$DEVICE-$DTYPE.json" >> "$OUT/log.txt" 2>&1 &
  done
  wait
  python3 - "$OUT" "$L" >> "$OUT/table.txt" <<'P'
import json, sys
from pathlib import Path
out, layout = Path(sys.argv[1]), sys.argv[2]
expected = json.loads((out / f"mini-{layout}-1-cpu-float32.json").read_text())["result"]
for path in sorted(out.glob(f"mini-{layout}-*-cuda-*.json")):
    found = json.loads(path.read_text())["result"]
    different = [case for case, tokens in found.items() if tokens != expected[case]]
    print(f"{path.stem:32} {len(found) - len(different)} of {len(found)} answers as on the CPU; different: {different[:12]}")
P
done; done
cat "$OUT/table.txt"
