"""A finished run to the Hugging Face hub: checkpoint, artefact and card in one folder, by the hub's own calls."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from .card import model_card
from .errors import SorbetError


def gather(run: Path, target: Path) -> list[str]:
    """What is uploaded, copied to `target`: the checkpoint of M3 with its tokenizer, model.sorbet, README.md."""
    card = model_card(run)
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted((run / "M3").iterdir()):
        if path.is_file() and path.suffix in (".json", ".safetensors", ".txt", ".model") and path.name != "result.json":
            shutil.copy(path, target / path.name)
    shutil.copy(run / "model.sorbet", target / "model.sorbet")
    (target / "README.md").write_text(card, encoding="utf-8")
    return sorted(path.name for path in target.iterdir())


def push(run: Path, repository: str, private: bool = False) -> str:
    """Upload to `repository` (user/name); returns its address. The token is the one of `hf auth login`."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if repository.count("/") != 1:
        raise SorbetError(f"repository is {repository!r}: it must read user/name")
    with TemporaryDirectory() as folder:
        gather(run, Path(folder))
        try:
            api = HfApi()
            url = api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Sorbet")
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            raise SorbetError(f"{repository}: the hub did not take it ({reason}); logged in? (hf auth login)") from None
    return str(url)
