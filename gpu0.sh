export PYTHONPATH=/tmp/site:$PWD/src:$PWD
timeout 90 python3 -m tests.gpu.steps bf16 fp8 nvfp4 --seconds 84 > $OUT/steps.txt 2> $OUT/steps.err
cat $OUT/steps.txt | cut -c1-260; tail -5 $OUT/steps.err | cut -c1-300
