"""What Sorbet raises and warns of on purpose: messages written for the person who reads them."""


class SorbetError(ValueError):
    """What was wrong, where, and what would be right."""


class ArtifactError(SorbetError):
    """A `.sorbet` file that cannot be read or trusted."""


class ConversionError(SorbetError):
    """A model that has no exact integer form."""


class DataError(SorbetError):
    """A text or table file that cannot be used as it is."""


class TruncationWarning(UserWarning):
    """A text longer than the model's positions lost its end."""
