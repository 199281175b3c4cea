import sys,re,collections
sys.path.insert(0,'/work/wt/tiles/proto')
from comp import build, sass
from shardwise.kernels.moe_block import fragments as f
from shardwise.kernels.linear.fragments import Fragments
from shardwise.kernels.linear.geometry import banks
ALU={'LOP3','SHF','PRMT','IADD3','ISETP','SEL','SGXT','VIADD','LEA','FSETP','FMNMX','VIMNMX','FSEL'}
def loops(d, show=False):
    L=[]
    for l in d.splitlines():
        m=re.match(r'\s*/\*([0-9a-f]{4,})\*/\s+(.*?);',l)
        if m: L.append((int(m.group(1),16),m.group(2)))
    for a,t in L:
        m=re.search(r'BRA.* (?:`\(\.L_x_\d+\)|0x([0-9a-f]+))',t)
        if m and m.group(1) and int(m.group(1),16)<a:
            s=int(m.group(1),16); body=[x for q,x in L if s<=q<=a]
            c=collections.Counter(re.sub(r'^@!?U?P\w+\s+','',x).split()[0].split('.')[0] for x in body)
            yield len(body),c,body
def one(kind,cfg,up=True,BT=8,show=False,MAT=False):
    for u,d in banks(True):
        if u.of.kind==kind and u.of.layout[2]==1024 and (kind!=1 or u.of.layout[4]): break
    of=u if up else d; name='BI' if up else 'BO'
    k=f.fragment_gate_up_kernel if up else f.fragment_down_kernel
    types=dict.fromkeys(("order","tiles","ids"),"*i32")|dict(x="*bf16",act="*bf16",shared_act="*bf16",y="*fp32",tokens="i32",most="i32")
    c=f._constants(of.of,of.of,8,BT,cfg,name,MAT)|{"PDL":False}
    t=types|{a:('*i32' if a=='value' else b) for a,b in of.types.items()}
    t|={f'shared_{a}':b for a,b in t.items() if a in('value','fine','coarse')}
    r=build(k,t,c,cfg.warps); dd,res=sass(r)
    w=cfg.BM*(2 if up else 1)*cfg.BK/(32*cfg.warps//cfg.splits)
    for n,cc,body in loops(dd):
        print(kind,cfg,up,'regs',re.findall(r'REG:\d+|STACK:\d+',res),'loop',n,'per weight',round(n/w,2),'alu',round(sum(v for q,v in cc.items() if q in ALU)/w,2), cc.most_common(14))
        if show: print('\n'.join(body))
        break
if __name__=='__main__':
    one(1,Fragments(16,128,4,4,4),MAT=True)
