def format_trace(trace):
    return str(trace.final.graph)
