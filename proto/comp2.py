import sys; sys.path.insert(0,'/work/wt/tiles/proto')
from comp import build, report, cs
from shardwise.kernels.moe_block import fragments as f
from shardwise.kernels.linear.geometry import banks
import os
types=dict.fromkeys(("order","tiles"),"*i32")|dict(x="*bf16",act="*bf16",shared_act="*bf16",y="*fp32",tokens="i32",most="i32")
which=sys.argv[1:]
seen=set()
for up,down in banks(True):
    k=(up.of.kind, up.of.layout[2], up.of.layout[4])
    label=str(k)
    if which and label.replace(' ','') not in which: continue
    for kern,of,name in ((f.fragment_gate_up_kernel,up,"BI"),(f.fragment_down_kernel,down,"BO")):
        cfg=f.config_of(of.of,name=="BI")
        for BT in (8,):
            c=f._constants(of.of,of.of,8,BT,cfg,name)|{"PDL":os.environ.get('PDL')=='1'}
            t=types|{a:('*i32' if a=='value' else b) for a,b in of.types.items()}
            t|={f'shared_{a}':b for a,b in t.items() if a in('value','fine','coarse')}
            try:
                r=build(kern,t,c,cfg.warps)
                print(label,name,cfg,BT); d=report(r); open(f'/tmp/s_{k[0]}_{k[1]}_{name}.sass','w').write(d)
            except Exception as e:
                import traceback; print(label,name,'FAILED',str(e)[-1500:]); 
