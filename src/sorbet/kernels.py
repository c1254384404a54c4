"""Which kernels compute on this machine."""


def describe() -> str:
    return "numpy (portable; this build carries no native kernels)"
