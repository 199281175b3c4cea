import sys; sys.path.insert(0,'/work/wt/tiles/proto')
from comp import build, report
from shardwise.kernels.linears import fragments as f
from shardwise.kernels.linear.geometry import case
for kind,val in (('nvfp4',8),('fp8_block',4)):
    cs=case(9216,2048,kind,True); r=2 if val==8 else 4
    for BM,W,S in ((16,4,4),(64,4,1)):
        t=dict(x='*bf16',tokens='i32')
        for n in range(3): t|={f'value{n}':'*i32',f'fine{n}':cs.types['fine'],f'coarse{n}':cs.types['coarse'],f'out{n}':'*bf16'}
        L=cs.of.layout; k=8*r*val
        c=dict(W0=L,W1=L,W2=L,BT=8,M0=BM,K0=k,RUN0=r,M1=0,K1=k,RUN1=r,M2=0,K2=k,RUN2=r,WARPS=W,SPLITS=S,PDL=len(sys.argv)>1)
        b=build(f.fragment_linears_kernel,t,c,W); print(kind,BM,W,S); d=report(b); open(f'/tmp/l_{kind}_{S}.sass','w').write(d)
