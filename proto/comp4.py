import sys; sys.path.insert(0,'/work/wt/tiles/proto')
from comp import build, report
import shardwise.kernels.linears.triton as lt
from shardwise.kernels.linears import fragments as f
from shardwise.kernels.linear.geometry import case
for kind in ('nvfp4','fp8_block'):
    cs=[case(8192,2048,kind,True),case(4096,2048,kind,True),case(64,2048,'bf16',True)]
    t=dict(x='*bf16',tokens='i32',conv='*bf16',state='*bf16',context='*i32',rows='*i32')
    for n in range(3): t|={f'value{n}':'*i32',f'fine{n}':cs[n].types['fine'],f'coarse{n}':cs[n].types['coarse'],f'out{n}':'*bf16'}
    c=f.split_constants([x.of for x in cs],4,f.split_rule(12288,4))|{'PDL':True}
    b=build(f.fragment_linears_kernel,t,c,c['WARPS']); print(kind); report(b)
