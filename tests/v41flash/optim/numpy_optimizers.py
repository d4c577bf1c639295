"""Both algorithms in a few lines of NumPy, one matrix at a time: the truth for the tests."""

import numpy as np

HYBRID = [(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2


def newton_schulz(x, coefficients=HYBRID, eps=1e-20):
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T, coefficients, eps).T
    x = x / (np.sqrt((x * x).sum()) + eps)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def muon(gradient, momentum, mu=0.95, rms=0.18):
    """(update, new momentum) of one matrix."""
    momentum = mu * momentum + gradient
    direction = newton_schulz(mu * momentum + gradient)
    return rms * np.sqrt(max(gradient.shape)) * direction, momentum


def sinkhorn(matrix, tau=1e-3, iterations=11, eps=1e-20):
    rho = np.sqrt((matrix * matrix).sum(axis=1))
    u = matrix * (rho > tau * rho.mean())[:, None]
    for k in range(1, iterations + 1):
        u = u / (np.sqrt((u * u).sum(axis=k % 2, keepdims=True)) + eps)
    return np.sqrt(matrix.shape[1]) * u


def sinkhorn_update(gradient, momentum, beta=0.95, tau=1e-3, iterations=11, eps=1e-20):
    """(update, new momentum) of one table."""
    momentum = beta * momentum + (1 - beta) * gradient
    averaged = beta * momentum + (1 - beta) * gradient
    return sinkhorn(averaged, tau, iterations, eps), momentum
