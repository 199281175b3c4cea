export PYTHONPATH=/tmp/site:$PWD/src:$PWD TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
run() { timeout $1 python3 -m torch.distributed.run --nproc-per-node $2 --master-port 29$((RANDOM%900+100)) -m tests.gpu.engine_case "${@:3}"; }
G=benchmarks/geometry/qwen3.6-35b-a3b
run 150 1 speed --model $G --batches 1 4 16 64 128 --profile 1 16 128 --out $OUT/s1.json > $OUT/s1.txt 2>&1; tail -12 $OUT/s1.txt; cut -c1-1200 $OUT/s1.json
run 60 2 answers --dtype float32 --out $OUT/a2.json > $OUT/a2.txt 2>&1; tail -5 $OUT/a2.txt
run 60 2 answers --dtype float32 --ratio 5,3 --out $OUT/a53.json > $OUT/a53.txt 2>&1; tail -5 $OUT/a53.txt
run 60 1 answers --dtype bfloat16 --out $OUT/b1.json > $OUT/b1.txt 2>&1; tail -5 $OUT/b1.txt
run 150 2 speed --model $G --batches 1 16 128 --profile 1 --out $OUT/s2.json > $OUT/s2.txt 2>&1; tail -12 $OUT/s2.txt; cut -c1-1200 $OUT/s2.json
python3 - <<'P'
import json,os
from tests.golden import eval as e
g=e.golden()
for f in ('a2','a53','b1'):
    try:
        a=json.load(open(os.environ['OUT']+f'/{f}.json'))
        bad=[k for k,v in a['result'].items() if tuple(v)!=g[int(k)].ids]
        print(f, len(a['result']), 'differ from HF', len(bad), [(k,g[int(k)].margin) for k in bad][:10], a['took_s'], a['ready_s'])
    except Exception as x: print(f,'no answers', x)
P
