"""Vulkan devices: the API, devices, memory and programs, one file each."""
