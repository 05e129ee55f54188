"""How the loss of a model falls with its size and its training: L(N, D) = E + A / N^alpha + B / D^beta.

Enters: what finished runs ended with, or the name of a published law. Leaves: a ScalingLaw, which predicts losses.
N is the number of parameters, D that of tokens or images, L the loss at the end of a run whose learning rate decayed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import BadRequestError

Numbers = np.ndarray | float

# Of the exponents, before any run is seen: published fits to text lie within this (mean, standard deviation). With
# many runs it hardly counts; with few it keeps the fit from following their noise.
EXPONENT = (0.35, 0.1)
# The least noise that is assumed of a loss, relative to it: two seeds differ by more.
LEAST_NOISE = 0.002
FEWEST_RUNS = 4


@dataclass(frozen=True)
class FinishedRun:
    """A model's parameters, what it has seen, and the loss that it ended with."""

    parameters: float
    seen: float
    loss: float


@dataclass(frozen=True)
class ScalingLaw:
    """`coefficients` are log A, log B, log E, alpha and beta, `covariance` is theirs; None if it is not known."""

    name: str
    coefficients: np.ndarray
    covariance: np.ndarray | None = None

    def loss(self, parameters: Numbers, seen: Numbers) -> Any:
        """The loss of a model of this size that has been trained for so long."""
        return _losses(self.coefficients, np.asarray(parameters), np.asarray(seen))

    def seen_at(self, parameters: float, loss: Numbers) -> Any:
        """How long a model of this size must be trained for that loss; infinite if it cannot get there."""
        log_a, log_b, log_e, alpha, beta = self.coefficients
        left = np.asarray(loss) - np.exp(log_e) - np.exp(log_a) / parameters**alpha
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(left > 0, np.exp((log_b - np.log(left)) / beta), np.inf)

    def deviation(self, predict: Callable[["ScalingLaw"], float]) -> float | None:
        """The standard deviation of what is predicted with this law; None if that is not known."""
        if self.covariance is None:
            return None
        gradient = np.zeros(len(self.coefficients))
        for i, spread in enumerate(np.sqrt(np.diag(self.covariance))):
            step = np.zeros_like(gradient)
            step[i] = 0.1 * spread
            up, down = (predict(ScalingLaw(self.name, self.coefficients + sign * step, None)) for sign in (1, -1))
            gradient[i] = (up - down) / (2 * step[i])
        return float(np.sqrt(gradient @ self.covariance @ gradient))


def _published(name: str, a: float, b: float, e: float, alpha: float, beta: float) -> ScalingLaw:
    return ScalingLaw(name, np.array([np.log(a), np.log(b), np.log(e), alpha, beta]))


# Transformers on web text, in nats per token of their tokenizers.
PUBLISHED = {
    "besiroglu": _published("besiroglu", 482.01, 2085.43, 1.8172, 0.3478, 0.3658),  # arXiv 2404.10102
    "hoffmann": _published("hoffmann", 406.4, 410.7, 1.69, 0.34, 0.28),  # arXiv 2203.15556, their third approach
}


def fit(runs: Sequence[FinishedRun]) -> ScalingLaw:
    """The law that fits runs best, in the relative error of the loss."""
    sizes, lengths = len({run.parameters for run in runs}), len({run.seen for run in runs})
    if len(runs) < FEWEST_RUNS or sizes < 2 or lengths < 2:
        raise BadRequestError(
            f"{len(runs)} finished stages of {sizes} sizes and {lengths} lengths were found; a law needs "
            f"{FEWEST_RUNS} from scratch, of 2 sizes and 2 lengths at least, or use a published one: --law besiroglu"
        )
    n, d, losses = (np.array([getattr(run, key) for run in runs]) for key in ("parameters", "seen", "loss"))
    noise = 0.01
    for _ in range(4):  # the noise follows from the fit, and the fit, by what is known of exponents, from the noise
        found = min(
            (_least_squares(_start(n, d, losses, share), n, d, losses, noise) for share in (0.5, 0.7, 0.9)),
            key=lambda one: float(_residuals(one, n, d, losses, noise) @ _residuals(one, n, d, losses, noise)),
        )
        off = np.log(_losses(found, n, d) / losses)
        noise = max(LEAST_NOISE, float(np.sqrt(off @ off / max(1, len(runs) - len(found)))))
    jacobian = _jacobian(found, n, d, losses, noise)
    return ScalingLaw("fitted", found, np.linalg.inv(jacobian.T @ jacobian))


def _losses(coefficients: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    log_a, log_b, log_e, alpha, beta = coefficients
    return np.exp(log_e) + np.exp(log_a - alpha * np.log(n)) + np.exp(log_b - beta * np.log(d))


def _start(n: np.ndarray, d: np.ndarray, losses: np.ndarray, share: float) -> np.ndarray:
    """A guess: that share of the lowest loss is left for ever, and size and training have half of the rest each."""
    exponent, lowest = EXPONENT[0], losses.min()
    rest = np.log((np.median(losses) - share * lowest) / 2)
    log_a, log_b = (rest + exponent * np.log(np.median(x)) for x in (n, d))
    return np.array([log_a, log_b, np.log(share * lowest), exponent, exponent])


def _residuals(coefficients: np.ndarray, n: np.ndarray, d: np.ndarray, losses: np.ndarray, noise: float) -> np.ndarray:
    """In standard deviations: of the losses, then of the exponents from what is usual."""
    off = np.log(_losses(coefficients, n, d) / losses) / noise
    return np.concatenate([off, (coefficients[3:] - EXPONENT[0]) / EXPONENT[1]])


def _jacobian(coefficients: np.ndarray, *data: Any) -> np.ndarray:
    columns = []
    for i in range(len(coefficients)):
        step = np.zeros_like(coefficients)
        step[i] = 1e-5
        columns.append((_residuals(coefficients + step, *data) - _residuals(coefficients - step, *data)) / 2e-5)
    return np.stack(columns, axis=1)


def _least_squares(start: np.ndarray, *data: Any) -> np.ndarray:
    """Levenberg and Marquardt's method: five numbers are not worth a dependency."""
    found, damping = start, 1.0
    residuals = _residuals(found, *data)
    for _ in range(300):
        jacobian = _jacobian(found, *data)
        normal = jacobian.T @ jacobian
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -jacobian.T @ residuals)
        tried = _residuals(found + step, *data)
        if tried @ tried < residuals @ residuals:
            found, residuals, damping = found + step, tried, damping / 3
            if np.abs(step).max() < 1e-9:
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    return found
