"""The module that runs, models of several parts, where steps end, and the ranks of a machine.

Torch's global hooks are set once and call listeners: hooks of a module would be copied and pickled
with it. While a forward follows its plan there are no listeners, and torch skips the hooks on that
thread (`hook_bypass`). The plan's events then say where something is saved; elsewhere the stack
does.
"""
