from ringspan.masks import Band, Mask, causal, chunked, documents, full, prefix, window
from ringspan.plans import plan, Plan, Shape
