"""`python -m sorbet`, which is what `accelerate launch -m sorbet` needs."""

from .cli import main

main()
