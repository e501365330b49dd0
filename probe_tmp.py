import time, sys
from collections import Counter
import tensorflow as tf, tf_stitch
from tf_stitch import Options
from tf_stitch.program import serialize
from tf_stitch.program.program import *
from models.workloads import REGISTRY
import tf_stitch.compiler as C
C.compile_texts = lambda texts, options, tell, workers=0: {t: {} for t in texts}
for kind in sys.argv[1:]:
    inst=REGISTRY[kind].instance()
    specs=[tf.TensorSpec(s.shape, s.dtype, f"x{i}") for i, s in enumerate(inst.signature())]
    f=tf.function(lambda *a: tf.nest.flatten(inst.function(*a)), autograph=False)
    cf=f.get_concrete_function(*specs)
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2
    for sk in (False, True):
        t=time.time()
        import tempfile, pathlib
        m=tf.Module(); m.weights=inst.params.variables
        m.call=tf.function(lambda *a:{f"y{i}":y for i,y in enumerate(tf.nest.flatten(inst.function(*a)))},autograph=False,input_signature=specs)
        d=pathlib.Path(tempfile.mkdtemp())
        tf.saved_model.save(m,str(d/"m"),signatures=m.call)
        r=tf_stitch.rewrite_saved_model(d/"m",d/"o",options=Options(target="cuda:sm_90",superkernels=sk),verify=False)
        from tensorflow.core.protobuf import saved_model_pb2
        sm=saved_model_pb2.SavedModel.FromString((d/"o"/"saved_model.pb").read_bytes())
        progs=[n.attr["program"].s for fn in sm.meta_graphs[0].graph_def.library.function for n in fn.node_def if n.op=="StitchedProgram"]
        progs+=[n.attr["program"].s for n in sm.meta_graphs[0].graph_def.node if n.op=="StitchedProgram"]
        for p in progs:
            p=serialize.loads(p)
            print(kind, sk, round(time.time()-t,1), Counter((type(s).__name__, getattr(s,'call',''), tuple(getattr(s,'flags',())) [4:6] if getattr(s,'call','')=='matmul' else '') for s in p.steps))
