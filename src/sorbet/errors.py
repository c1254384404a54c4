"""The one exception that Sorbet raises on purpose: its message is written for the person who reads it."""


class SorbetError(ValueError):
    """What was wrong, where, and what would be right."""


class ArtifactError(SorbetError):
    """A `.sorbet` file that cannot be trusted or read."""


class ConversionError(SorbetError):
    """A model that has no exact integer form."""
