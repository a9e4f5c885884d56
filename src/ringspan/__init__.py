from ringspan.masks import Band, Mask, causal, chunked, documents, full, prefix, window
