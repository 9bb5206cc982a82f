"""The Hub client's errors in this project's terms: who must do what, and with which exit code."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from finalbench.errors import EnvironmentMissing, UsageError


@contextmanager
def hub_errors(repo_id: str) -> Generator[None, None, None]:
    """`EnvironmentMissing` (exit 3) for token, network and service, `UsageError` for the name."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise EnvironmentMissing(
            "HF_HUB_OFFLINE is set, so nothing can be sent or fetched", hint="unset HF_HUB_OFFLINE"
        ) from error
    except errors.LocalTokenNotFoundError as error:
        raise EnvironmentMissing("no Hub token", hint="set HF_TOKEN or run `hf auth login`") from (
            error
        )
    except errors.HFValidationError as error:
        raise UsageError(f"{repo_id} is no repository name: {error}") from error
    except errors.HfHubHTTPError as error:
        raise _http(repo_id, error) from error
    except (httpx2.HTTPError, OSError) as error:
        raise EnvironmentMissing(
            f"the Hub cannot be reached ({type(error).__name__})",
            hint="check the network, and HF_ENDPOINT if it is set",
        ) from error


def status_of(error: Exception) -> int | None:
    """The HTTP status of a Hub error, where it has one."""
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None)


def _http(repo_id: str, error: Exception) -> EnvironmentMissing:
    status = status_of(error)
    if status == 401:
        return EnvironmentMissing(
            "the Hub refused the token: missing, expired or not valid for this repository",
            hint="set HF_TOKEN to a current token, or use a trusted publisher in CI",
        )
    if status == 403:
        return EnvironmentMissing(
            f"the token may not write to {repo_id}", hint="use a token with write access"
        )
    if status == 404:
        return EnvironmentMissing(f"{repo_id} does not exist, or the token may not see it")
    return EnvironmentMissing(f"the Hub answered {status} for {repo_id}; nothing more was sent")
