import sys, collections, subprocess, tempfile, re
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.compiler import compile as cs
sys.path.insert(0,'/work/wt/tiles/proto')
import importlib
def build(kernel, types, consts, warps, arch=90, maxnreg=None):
    sig={p.name: ('constexpr' if p.name in consts else types[p.name]) for p in kernel.params}
    attrs={(i,):[["tt.divisibility",16]] for i,(n,k) in enumerate(sig.items()) if k.startswith('*')}
    cst={(i,):consts[n] for i,(n,k) in enumerate(sig.items()) if n in consts}
    src=GluonASTSource(kernel, sig, cst, attrs)
    return cs(src, target=GPUTarget('cuda',arch,32), options={'num_warps':warps, **({'maxnreg':maxnreg} if maxnreg else {})})
def sass(c):
    with tempfile.NamedTemporaryFile(suffix='.cubin') as f:
        f.write(c.asm['cubin']); f.flush()
        d=subprocess.run([triton.knobs.nvidia.cuobjdump.path,'-sass',f.name],capture_output=True,text=True).stdout
        r=subprocess.run([triton.knobs.nvidia.cuobjdump.path,'-res-usage',f.name],capture_output=True,text=True).stdout
    return d,r
def report(c, show=0):
    d,r=sass(c)
    ops=collections.Counter()
    lines=[]
    for l in d.splitlines():
        m=re.match(r'\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*)',l)
        if m: ops[m.group(2).split('.')[0] if not m.group(2).startswith(('LDG','HMMA','LDS','STS')) else m.group(2)]+=1; lines.append(l)
    print(re.findall(r'REG:\d+|STACK:\d+|SHARED:\d+',r), 'shared', c.metadata.shared, 'total', sum(ops.values()))
    print(ops.most_common(28))
    return d
if __name__=='__main__':
    import frag
    types=dict(x='*bf16',value='*i32',fine='*u8',act='*bf16',order='*i32',starts_expert='*i32',starts_first='*i32',starts_stop='*i32')
    for (BI,BT,BK,KW,W) in ((32,8,128,16,2),(64,8,128,16,4),(32,8,256,32,2),(64,8,256,32,4)):
        c=build(frag.gate_up_fp4,types,dict(H=2048,I=512,TOP_K=8,BI=BI,BT=BT,BK=BK,KW=KW,WARPS=W),W)
        print(BI,BT,BK,KW,W); d=report(c)
        open(f'/tmp/s_{BI}_{BK}.sass','w').write(d)
