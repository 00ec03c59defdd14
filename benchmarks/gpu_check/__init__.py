"""One command that checks the verifier on a GPU, stage by stage, and its rehearsal on a CPU.

`__main__`, `plan` and `runner` import nothing but the standard library, so that they can name what is missing;
each stage is a module with `run(setting, report)`, in a process of its own (`stage`). What is compared with what
is in `variants`. Nothing else imports this folder but tests.
"""
