export PYTHONPATH=/tmp/site:$PWD/src:$PWD TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
run() { python3 -m torch.distributed.run --nproc-per-node $1 --master-port 29$((RANDOM%900+100)) -m tests.gpu.engine_case "${@:2}"; }
timeout 150 python3 -m tests.gpu.parity > $OUT/parity.txt 2>&1; tail -12 $OUT/parity.txt
timeout 100 bash -c "$(declare -f run); run 1 answers --dtype float32 --out $OUT/a1.json" > $OUT/a1.txt 2>&1; tail -5 $OUT/a1.txt
timeout 200 bash -c "$(declare -f run); run 1 speed --model benchmarks/geometry/qwen3.6-35b-a3b --batches 1 16 --out $OUT/s1.json" > $OUT/s1.txt 2>&1; tail -25 $OUT/s1.txt; cut -c1-900 $OUT/s1.json
python3 - <<'P'
import json,os
from tests.golden import eval as e
g=e.golden()
try:
    a=json.load(open(os.environ['OUT']+'/a1.json'))
    bad=[k for k,v in a['result'].items() if tuple(v)!=g[int(k)].ids]
    print('answers', len(a['result']), 'differ from HF', [(k,g[int(k)].margin) for k in bad][:10], a['took_s'], a['ready_s'])
except Exception as x: print('no answers', x)
P
