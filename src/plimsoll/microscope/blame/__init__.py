"""The sources of an error.

Each module's own operations, without those of the modules that it calls, are a *unit*. In the step as it is, every unit
is computed once more in the wide format from the very values that came into it, and its backward from the gradients
that came back to it. The differences are its *local errors*: of what it gives out, and of the gradients that it hands
on. They are found for all units at once.

A local error's *contribution* is what becomes of it: the reference is run again with this one error added where it
arose. To first order contributions add up to the whole error of the gradients, and a share is the contribution's
projection on the whole. Shares may be negative, where errors cancel.
"""
