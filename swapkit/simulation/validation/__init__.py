"""What a plan has to keep to, derived once more and from the trace alone.

Nothing here is used by lowering, by planners or by the simulator, and nothing of theirs is used
here: a mistake has to be made twice, in different words, to stay unseen.
"""
