"""Service accounts: which pods run as which, what they are made with, and who gets a token."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest

from tests.deploy.chart import Object, objects_of_kind, pods, render, render_text

COMPONENT = "app.kubernetes.io/component"
ACCOUNTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "neither named": ({}, "demo-rayzero", "demo-rayzero-workers"),
    "one made": ({"name": "mysa"}, "mysa", "mysa"),
    "one there already": ({"create": False, "name": "mysa"}, "mysa", "mysa"),
    "another for workers": ({"name": "mysa", "workerName": "data"}, "mysa", "data"),
    "both there already": ({"create": False, "name": "a", "workerName": "b"}, "a", "b"),
    "workers' named": ({"workerName": "data"}, "demo-rayzero", "data"),
    "the namespace's": ({"create": False}, "default", "default"),
}
WITH_ACCOUNTS = pytest.mark.parametrize(
    ("values", "head", "others"), ACCOUNTS.values(), ids=ACCOUNTS
)


def account_objects(values: dict[str, Any]) -> tuple[list[Object], dict[str, str]]:
    """What is rendered, and the pods' service accounts by component."""
    objects = render({"serviceAccount": values})
    accounts = {
        pod["metadata"]["labels"][COMPONENT]: pod["spec"]["serviceAccountName"]
        for pod in pods(objects)
    }
    return objects, accounts


@WITH_ACCOUNTS
def test_every_pod_has_the_named_identity(values: dict[str, Any], head: str, others: str) -> None:
    """A bucket that trusts one service account is reached by workers and `helm test`, too."""
    objects, accounts = account_objects(values)
    assert accounts == {"head": head, "worker": others, "submitter": others, "test": others}
    made = {item["metadata"]["name"] for item in objects_of_kind(objects, "ServiceAccount")}
    assert made == ({head, others} if values.get("create", True) else set())


@WITH_ACCOUNTS
def test_only_the_autoscaler_has_a_token_and_a_role(
    values: dict[str, Any], head: str, others: str
) -> None:
    objects, _ = account_objects(values)
    tokens = {
        pod["metadata"]["labels"][COMPONENT]: pod["spec"]["automountServiceAccountToken"]
        for pod in pods(objects)
    }
    assert tokens == {"head": True, "worker": False, "submitter": False, "test": False}
    (binding,) = objects_of_kind(objects, "RoleBinding")
    assert [subject["name"] for subject in binding["subjects"]] == [head]


def test_made_accounts_have_the_annotations() -> None:
    for names in ({}, {"name": "mysa"}, {"workerName": "data"}):
        objects, _ = account_objects(names | {"annotations": {"iam/role": "training"}})
        made = objects_of_kind(objects, "ServiceAccount")
        assert {item["metadata"]["annotations"]["iam/role"] for item in made} == {"training"}


def test_annotations_of_an_account_that_is_not_made_are_refused() -> None:
    values = {"create": False, "name": "mysa", "annotations": {"iam/role": "training"}}
    with pytest.raises(helm_python.HelmError) as caught:
        render_text({"serviceAccount": values})
    assert "serviceAccount.annotations" in str(caught.value)
    assert "annotate mysa yourself" in str(caught.value)
