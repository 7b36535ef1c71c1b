"""Clusters: names, files, line rates."""

from __future__ import annotations

import pytest

from shardwright.core.errors import SpecError
from shardwright.planner.cluster import LinkSpec, make_cluster
from shardwright.planner.device import DEVICES, find_device
from shardwright.planner.files import cluster_from_table, read_cluster, read_model


def test_a_link_faster_than_its_line_rate_is_bits_taken_for_bytes():
    with pytest.raises(SpecError, match=r"line rate of 50 GB/s.*divide Gb/s by 8"):
        LinkSpec(kind="400g", bandwidth_gbps=400, latency_us=5)


@pytest.mark.parametrize("bandwidth", [0, -1])
def test_links_have_a_positive_bandwidth(bandwidth):
    with pytest.raises(SpecError, match="bandwidth_gbps must be greater than 0"):
        LinkSpec(kind="other", bandwidth_gbps=bandwidth, latency_us=1)


def test_unknown_devices_networks_and_kinds_get_the_nearest_name():
    with pytest.raises(SpecError, match="did you mean 'h100-80'"):
        find_device("h100-08")
    with pytest.raises(SpecError, match="did you mean '8x400g-ib'"):
        make_cluster("h100", 16, network="8x400g-ip")
    with pytest.raises(SpecError, match="unknown link kind 'nvlnk4'"):
        LinkSpec(kind="nvlnk4", bandwidth_gbps=1, latency_us=1)


def test_devices_must_fill_nodes():
    with pytest.raises(SpecError, match="found 12 devices and 8 per node"):
        make_cluster("a100-80", 12)


def test_a_node_s_bandwidth_is_that_of_all_its_cards():
    assert make_cluster("h100", 64, network="8x400g-ib").node_gbps == 400
    assert make_cluster("h800", 64, network="2x100g-roce").node_gbps == 25


def test_an_unstated_network_is_the_usual_one_and_marked():
    assert make_cluster("h100", 16).is_network_assumed
    assert not make_cluster("h100", 8).is_network_assumed
    assert not make_cluster("h100", 16, network="8x400g-ib").is_network_assumed


def test_devices_without_nvlink_talk_over_pcie():
    assert make_cluster("rtx-4090", 4).inner.bandwidth_gbps == 32
    assert make_cluster("h100", 8).inner.bandwidth_gbps == 450
    assert make_cluster("h100", 8, uses_pcie=True).inner.bandwidth_gbps == 64


def test_every_device_states_its_source_and_plausible_figures():
    for device in DEVICES.values():
        assert device.source
        assert 0.4 < device.sustained_share <= 0.95, device.name
        assert 10 < device.peak_flops("bf16") / (device.memory_gbps * 1e9) < 500, device.name


def test_a_device_without_narrow_units_says_so():
    with pytest.raises(SpecError, match="'a100-80' has no fp8 matrix units"):
        find_device("a100").peak_flops("fp8")


def test_a_cluster_file_is_read_with_links_of_its_own(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(
        """
        [cluster]
        name = "lab"
        device = "a100-80"
        num_nodes = 4
        devices_per_node = 8
        num_nics = 2
        [cluster.outer]
        kind = "200g"
        bandwidth_gbps = 25.0
        latency_us = 7.0
        """
    )
    cluster = read_cluster(path)
    assert (cluster.name, cluster.num_devices, cluster.node_gbps) == ("lab", 32, 50)
    assert not cluster.is_network_assumed


CLUSTER = {"device": "h100", "num_nodes": 2, "devices_per_node": 8}
LINK = {"kind": "200g", "bandwidth_gbps": 25.0, "latency_us": 7.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nodes": "2"}, "num_nodes must be a whole number, found '2'"),
        ({"num_nodes": 2.0}, "num_nodes must be a whole number, found 2.0"),
        ({"devices_per_node": True}, "devices_per_node must be a whole number, found True"),
        ({"num_nodes": -1}, "num_nodes must be greater than 0"),
        ({"network": ["8x400g-ib"]}, "network must be a text"),
        ({"uses_pcie": "no"}, "uses_pcie must be true or false, found 'no'"),
        ({"device": 7}, "device of cluster must be a table of settings"),
        ({"device": {"name": "mine"}}, "device of cluster lacks memory_gib, memory_gbps"),
        ({"outer": {**LINK, "bandwidth_gbps": "25"}}, "bandwidth_gbps must be a number"),
        ({"outer": {**LINK, "latency_us": float("nan")}}, "latency_us must be a number, found nan"),
        ({"outer": {"kind": "200g"}}, "outer link of cluster lacks bandwidth_gbps, latency_us"),
        ({"outer": LINK, "num_nics": 1.5}, "num_nics must be a whole number"),
        ({"outer": LINK, "network": "8x400g-ib"}, "network and outer describe the same link"),
        ({"inner": LINK, "uses_pcie": True}, "uses_pcie and inner describe the same link"),
    ],
)
def test_values_of_a_cluster_are_of_their_types_and_say_things_once(changes, message):
    with pytest.raises(SpecError, match=message):
        cluster_from_table({**CLUSTER, **changes}, "cluster")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.toml", b"\xff\xfe\x00", "must be UTF-8 text; found other bytes, first at byte 0"),
        ("x.toml", b"", "is empty; give another file"),
        ("x.toml", b"a = " + b"[" * 100_000, "must be TOML; found: it is nested too deeply"),
        ("x.json", b"[" * 100_000, "must be JSON .*; found: it is nested too deeply"),
        ("x.json", b"[1]", "must hold a table of settings, found list"),
        ("x.toml", b"a = ", "must be TOML; found: "),
        ("x.toml", b"[model]\nlayers = 1\n[extra]\n", r"'extra' beside the section \[model\]"),
    ],
)
def test_files_that_hold_no_settings_are_refused_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SpecError, match=message) as caught:
        read_model(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [lambda path: read_model(str(path)), read_cluster])
def test_files_that_are_not_there_are_named(tmp_path, read):
    with pytest.raises(SpecError, match=r"none\.toml': No such file or directory; check the path"):
        read(tmp_path / "none.toml")
    with pytest.raises(SpecError, match=r"No such file|Is a directory"):
        read(tmp_path)


def test_unknown_and_missing_keys_of_a_cluster_are_named():
    with pytest.raises(SpecError, match=r"unknown key 'nodes'.*did you mean 'num_nodes'"):
        cluster_from_table({"device": "h100", "nodes": 1}, "cluster")
    with pytest.raises(SpecError, match="lacks 'num_nodes'"):
        cluster_from_table({"device": "h100", "devices_per_node": 8}, "cluster")


def test_models_are_read_from_sizes_and_from_a_folder_with_a_configuration(tmp_path):
    sizes = tmp_path / "small.toml"
    sizes.write_text(
        "layers = 2\nhidden = 64\nheads = 4\nkv_heads = 4\nffn_hidden = 128\nvocab = 100\n"
    )
    assert read_model(str(sizes)).name == "small"
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox"}')
    with pytest.raises(SpecError, match="model_type 'gpt_neox'"):
        read_model(str(tmp_path))
    sizes.write_text("layer = 2\n")
    with pytest.raises(SpecError, match="unknown key 'layer'; did you mean 'layers'"):
        read_model(str(sizes))
