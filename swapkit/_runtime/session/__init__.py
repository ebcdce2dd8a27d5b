"""The public `Session`, its life, statistics, texts and files.

The end of a session lifts the limit at once, on any thread. The state of the thread that entered
(autograd's hooks, the recorder's mode, the plan) becomes inert; that thread removes it at the end
of its step, or when it next enters or leaves a session.
"""
