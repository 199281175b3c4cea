"""GPU: fragments against what is there. usage: bench.py warm|time FORMAT"""
import sys, os, json, time, itertools, traceback
import torch, triton
sys.path.insert(0,'.')
from tests.kernels.weights import make_weight
from tests.gpu.check_quant import microseconds, relative, choices
from shardwise.kernels.linear.tiles import operand, target_of
from shardwise.kernels.linear import fragments as fr
from shardwise.kernels.linear.fragments import Fragments
from shardwise.kernels.moe_block import fragments as mf, triton as mb, reference as mref
from shardwise.kernels.linears import fragments as lf, triton as lt
from shardwise.kernels.linear.reference import dequantise
D='cuda'; E,H,I,K=256,2048,512,8
form=sys.argv[2]; T0=time.time(); LIMIT=float(os.environ.get('LIMIT','75'))
res=[]
def say(*a): print(*a, flush=True)
tgt=target_of(torch.device(D))
val={'bf16':2,'fp8_block':4,'nvfp4':8}[form]
def mk():
    up=make_weight((E,2*I,H),form,0,D); dn=make_weight((E,H,I),form,1,D)
    su=make_weight((2*I,H),form,2,D); sd=make_weight((H,I),form,3,D)
    return up,dn,su,sd
up,dn,su,sd=mk(); ops=[operand(w,True) for w in (up,dn,su,sd)]
def F(BM,mul,run,warps,splits=1): return Fragments(BM, 8*run*val*mul, run, warps, splits)
r=2 if val==8 else 4
UPS=[F(32,1,4,2),F(16,1,4,2,2),F(32,1,2,2)] if val==8 else [F(16,1,4,4,4),F(16,1,4,2,2),F(32,1,4,2),F(32,2,4,2)]
DNS=[F(64,1,r,4),F(32,1,r,2),F(128,1,r,4)]+([F(64,1,4,4)] if val==8 else [])
UPS=[u for u in UPS if u.BK<=H]; DNS=[d for d in DNS if d.BK*d.splits<=I]
def run(x,c,gate,cfg,BT,pdl=False):
    return mf.moe(x,*ops,c[0].contiguous(),c[1].contiguous(),gate,E,tgt.name,pdl,(BT,*cfg))
def inputs(T,n):
    return torch.randn(T,H,device=D).bfloat16(), choices(T,n), torch.randn(T,1,device=D)
LIN={'bf16':[],'fp8_block':[(9216,2048),(2048,4096),(12288,2048)],'nvfp4':[(9216,2048),(2048,4096),(12288,2048)]}[form]
if form=='bf16': LIN=[(9216,2048),(2048,4096)]
LCF=[lf.Split(16,8,4,4),lf.Split(16,8,8,8),lf.Split(16,8,2,2),lf.Split(16,16,4,4),lf.Split(16,16,8,8),lf.Split(16,16,2,2),lf.Split(32,16,4,2),lf.Split(32,8,8,4)]
PLAIN=make_weight((64,H),'bf16',7,D)
def lin(x,of,c,pdl=False): return lt._split(x,of,[torch.bfloat16]*len(of),None,c,pdl)
if sys.argv[1]=='warm':
    n,N=int(sys.argv[3]),int(sys.argv[4]); job=0
    x,cs,g=inputs(4,1)
    jobs=[(lambda u=u,BT=BT: run(x,cs[0],g,(u,DNS[0]),BT)) for u in UPS for BT in (8,16)]
    jobs+=[(lambda d=d,BT=BT: run(x,cs[0],g,(UPS[0],d),BT)) for d in DNS for BT in (8,16)]
    for s in LIN:
        of=operand(make_weight(s,form,0,D),True); xx=torch.randn(1,s[1],device=D).bfloat16()
        jobs+=[(lambda of=of,c=c,xx=xx: lin(xx,[of],c)) for c in LCF]
    if val>2: jobs+=[(lambda c=c: lin(x,[operand(make_weight(s,form,0,D),True) for s in ((8192,H),(4096,H))]+[operand(PLAIN,True)],c)) for c in LCF]
    jobs+=[(lambda d=d: run(x,cs[0],g,(UPS[0],d),8,True)) for d in DNS]
    for j,f in enumerate(jobs):
        if j%N==n:
            try: f()
            except Exception as e: say('WARM FAIL',form,j,str(e)[-200:])
    sys.exit()
for T in (1,5,64,300):
    x,cs,g=inputs(T,1)
    want=mref.moe_shared(x.float(),up,dn,cs[0][0],cs[0][1],[su],[sd],g)
    for name,f in [('new by rule',lambda: mb.moe_shared(x,up,dn,cs[0][0],cs[0][1],[su],[sd],g))]+[(f'{i}',(lambda i=i: run(x,cs[0],g,(UPS[i%len(UPS)],DNS[i%len(DNS)]),8 if i%2 else 16))) for i in range(max(len(UPS),len(DNS)))]:
        try:
            got=f(); torch.cuda.synchronize(); e=relative(got,want.double())
            if not e<1e-2: say(form,'T',T,name,'ERROR',e)
        except Exception as ex: say(form,'T',T,name,'FAIL',str(ex)[-300:])
    say(form,'T',T,'last error',e)
nb=sum(w.nbytes for w in (up,dn))
for T in (2,4,8,16,64,128,256,512):
    if time.time()-T0>LIMIT: say('out of time'); break
    n=24 if T<16 else 8
    x,cs,g=inputs(T,n); hit=sum(c[0].unique().numel() for c in cs)/n
    floor=nb*hit/E/4.3e12*1e6
    def us(f,k=n):
        try: return microseconds([lambda c=c: f(c) for c in cs[:k]],6)
        except Exception as ex: say('FAIL',T,str(ex)[-200:]); return 1e9
    os.environ['FRAG_OFF']='1'; old=us(lambda c: mb.moe_shared(x,up,dn,c[0],c[1],[su],[sd],g)); os.environ['FRAG_OFF']=''
    BTs=(8,) if T<16 else (8,16) if T<512 else (16,32)
    a=sorted((us(lambda c: run(x,c,g,(u,DNS[0]),BT)),BT,tuple(u)) for u in UPS for BT in BTs)
    b=sorted((us(lambda c: run(x,c,g,(UPS[0],d),BT)),BT,tuple(d)) for d in DNS for BT in BTs)
    rank=us(lambda c: mf.rank_tiles(c[0],E,8,False))
    best=us(lambda c: run(x,c,g,(Fragments(*a[0][2]),Fragments(*b[0][2])),a[0][1]))
    pd=us(lambda c: run(x,c,g,(Fragments(*a[0][2]),Fragments(*b[0][2])),a[0][1],True)); best=f'{best:.1f} pdl {pd:.1f}'
    say(f'{form} experts T={T} floor {floor:.0f} old {old:.1f} best {best} rank {rank:.1f} | up', [(round(q),B,c) for q,B,c in a[:4]], round(a[-1][0]), '| down', [(round(q),B,c) for q,B,c in b[:3]])
    res.append(dict(T=T,floor=floor,old=old,best=best,up=a,down=b,rank=rank))
groups=[[s] for s in LIN[:2]]+([[(8192,H),(4096,H),None]] if val>2 else [])
for gr in groups:
    n=max(4,min(16, 200*2**20//sum(make_weight(s,form,0,D).nbytes for s in gr if s)))
    sets=[[make_weight(s,form,i,D) if s else PLAIN for s in gr] for i in range(n)]
    ofs=[[operand(w,True) for w in ws] for ws in sets]
    nb=sum(w.nbytes for w in sets[0])
    for T in (1,2,4,8,16,32):
        if time.time()-T0>LIMIT: say('out of time'); break
        x=torch.randn(T,gr[0][1],device=D).bfloat16()
        os.environ['FRAG_OFF']='1'
        old=microseconds([lambda ws=ws: lt.linears(x,ws,[None]*len(ws)) for ws in sets],6)
        os.environ['FRAG_OFF']=''
        f=[]
        for c in LCF:
            if T<=8 and c.BT>8: continue
            try:
                got=lin(x,ofs[0],c)
                for w,q in zip(sets[0],got):
                    e=relative(q,x.double()@dequantise(w,torch.float64).T)
                    if not e<1e-2: say(form,gr,T,c,'ERROR',e)
                t=microseconds([lambda o=o: lin(x,o,c) for o in ofs],6); tp=microseconds([lambda o=o: lin(x,o,c,True) for o in ofs],6)
                f.append((t,tuple(c),round(tp,1)))
            except Exception as ex: say('FAIL',gr,T,c,str(ex)[-200:])
        f.sort()
        say(f'{form} linears {gr} T={T} floor {nb/4.3e6:.1f} old {old:.1f}', [(round(q,1),c,p) for q,c,p in f[:3]], round(f[-1][0],1))
        res.append(dict(s=str(gr),T=T,old=old,new=f))
json.dump(res,open(os.environ['OUT']+f'/frag-{form}{os.environ.get("FRAG_UNROLL","")}{os.environ.get("FRAG_REGS","")}.json','w'))
